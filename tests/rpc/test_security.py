"""Who gets in over TLS and tokens, what those see who do not, and that nothing is executed for them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec
import pytest
import trustme

from astraflow.rpc import (
    RpcError,
    Server,
    Tls,
    Token,
    TokenFile,
    TokenVariable,
    Unauthorized,
    Unavailable,
    connect,
    describe,
    method,
    serve,
)
from astraflow.rpc import frames as wire
from astraflow.rpc.sparing import BURST, EVERY, SparingLog

SECRET = "a token of some length"


class Word(msgspec.Struct, frozen=True):
    text: str = ""


class Place(Protocol):
    @method(idempotent=True)
    async def read(self, request: Word, /) -> Word: ...


class PlaceImpl:
    def __init__(self) -> None:
        self.begun: list[str] = []

    async def read(self, request: Word, /) -> Word:
        self.begun.append(request.text)
        return request


class Authority:
    """A private CA and files of certificates that it signed."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._ca = trustme.CA()
        self.ca = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, *names: str, ca: Path | None = None, expired: bool = False) -> Tls:
        until = datetime.now(UTC) - timedelta(days=1) if expired else None
        since = datetime(2020, 1, 1, tzinfo=UTC) if expired else None
        leaf = self._ca.issue_cert(*names, not_before=since, not_after=until)
        path = self._directory / f"{len(list(self._directory.iterdir()))}.pem"
        leaf.private_key_and_cert_chain_pem.write_to_path(path)
        return Tls(ca=ca, certificate=path)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


@asynccontextmanager
async def place(
    tls: Tls | None, address: str = "tls://127.0.0.1:0", **options: Any
) -> AsyncIterator[tuple[Server, PlaceImpl]]:
    impl = PlaceImpl()
    async with serve(impl, Place, address, tls=tls, **options) as server:
        yield server, impl


async def refused(address: str, kind: type[RpcError], reason: str, tls: Tls | None, token: Token | None = None) -> None:
    with anyio.fail_after(5), pytest.raises(kind, match=reason):
        async with connect(address, Place, tls=tls, token=token, connect_timeout=0.3):
            pytest.fail("let in")


async def raw(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))


async def logged(capsys: pytest.CaptureFixture[str], pattern: str) -> None:
    """Wait until the server has said so."""
    seen = ""
    with anyio.move_on_after(3):
        while not re.search(pattern, seen):
            await anyio.sleep(0.01)
            seen += capsys.readouterr().out
        return
    pytest.fail(f"no {pattern!r} in: {seen}")


# --- who is let in ---------------------------------------------------------------------------------------------------


async def test_calls_and_large_messages_travel_over_tls(authority: Authority) -> None:
    tls = authority.issue("127.0.0.1")
    async with (
        place(tls, token=SECRET) as (server, impl),
        connect(server.address, Place, tls=Tls(ca=authority.ca), token=SECRET) as proxy,
    ):
        assert server.address.startswith("tls://127.0.0.1:")
        assert await proxy.read(Word("x" * 3_000_000)) == Word("x" * 3_000_000)
        async with anyio.create_task_group() as tasks:
            for n in range(200):
                tasks.start_soon(proxy.read, Word(str(n)))
    assert len(impl.begun) == 201


async def test_a_name_is_enough(authority: Authority) -> None:
    async with (
        place(authority.issue("localhost"), "tls://localhost:0", token=SECRET) as (server, _),
        connect(server.address, Place, tls=Tls(ca=authority.ca), token=SECRET) as proxy,
    ):
        assert await proxy.read(Word("x")) == Word("x")


async def test_mutual_tls(authority: Authority, stranger: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    async with place(authority.issue("127.0.0.1", ca=authority.ca), token=SECRET) as (server, impl):
        async with connect(server.address, Place, tls=authority.issue("c", ca=authority.ca), token=SECRET) as proxy:
            assert await proxy.read(Word("x")) == Word("x")
        for tls, said in (
            (Tls(ca=authority.ca), "did not return a certificate|PEER_DID_NOT"),
            (
                stranger.issue("c", ca=authority.ca),
                "not accepted: (unable to get local issuer|self-signed)",
            ),
            (authority.issue("c", ca=authority.ca, expired=True), "not accepted: certificate has expired"),
        ):
            await refused(server.address, RpcError, r"want one that it knows|ALERT", tls, SECRET)
            await logged(capsys, said)
    assert impl.begun == ["x"]


@pytest.mark.parametrize(("token", "reason"), [(None, "a token is required"), ("wrong", "the token is wrong")])
async def test_without_the_token(
    authority: Authority, token: str | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with place(authority.issue("127.0.0.1"), token=SECRET) as (server, impl):
        await refused(server.address, Unauthorized, reason, Tls(ca=authority.ca), token)
        await logged(capsys, rf"peer refused.*peer=127.0.0.1:\d+.*{reason}")
    assert impl.begun == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("expired", "certificate has expired"),
        ("name", "certificate is not valid for|IP address mismatch"),
        ("authority", "unable to get local issuer|self-signed"),
    ],
)
async def test_a_client_refuses_a_server_it_cannot_trust(
    authority: Authority, stranger: Authority, case: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tls = {
        "expired": lambda: authority.issue("127.0.0.1", expired=True),
        "name": lambda: authority.issue("elsewhere.example"),
        "authority": lambda: stranger.issue("127.0.0.1"),
    }[case]()
    async with place(tls, token=SECRET) as (server, impl):
        await refused(server.address, Unauthorized, reason, Tls(ca=authority.ca), SECRET)
        await logged(capsys, "peer dropped.*(broke off the TLS handshake|ALERT)")
    assert impl.begun == []


# --- who speaks something else ---------------------------------------------------------------------------------------


async def test_plain_tcp_on_a_tls_port(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    async with place(authority.issue("127.0.0.1"), token=SECRET) as (server, impl):
        plain = server.address.replace("tls://", "tcp://")
        await refused(plain, Unavailable, "tls://|closed", None, SECRET)
        await logged(capsys, "peer dropped.*does not speak TLS")
    assert impl.begun == []


async def test_a_tls_client_on_a_plain_port(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    async with place(None, "tcp://127.0.0.1:0") as (server, impl):
        address = server.address.replace("tcp://", "tls://")
        await refused(address, Unavailable, "does not speak TLS", Tls(ca=authority.ca))
        await logged(capsys, "peer refused.*one side speaks TLS")
    assert impl.begun == []


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\xff"]
)
async def test_garbage_before_tls(authority: Authority, data: bytes) -> None:
    async with place(authority.issue("127.0.0.1"), token=SECRET) as (server, impl):
        reader, writer = await raw(server)
        writer.write(data)
        with anyio.fail_after(3):
            with suppress(ConnectionResetError):
                await reader.read()
        writer.close()
        async with connect(server.address, Place, tls=Tls(ca=authority.ca), token=SECRET) as proxy:
            assert await proxy.read(Word("still")) == Word("still")
    assert impl.begun == ["still"]


# --- limits on strangers ---------------------------------------------------------------------------------------------


async def test_a_slow_handshake_is_cut(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.rpc.server.HANDSHAKE_TIMEOUT", 0.3)
    async with place(authority.issue("127.0.0.1"), token=SECRET) as (server, _):
        reader, writer = await raw(server)
        begin = anyio.current_time()
        with anyio.fail_after(3):
            for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500:
                if reader.at_eof():
                    break
                try:
                    writer.write(bytes([byte]))
                    await writer.drain()
                except ConnectionError:
                    break
                await anyio.sleep(0.05)
        assert anyio.current_time() - begin < 1.5
        writer.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tls://127.0.0.1:0"])
async def test_a_server_too_busy_to_open_a_connection_in_time_lives_on(
    authority: Authority, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = authority.issue("127.0.0.1") if address.startswith("tls") else None
    async with place(tls, address, token=SECRET) as (server, _):
        with monkeypatch.context() as patch:
            patch.setattr("astraflow.rpc.server.HANDSHAKE_TIMEOUT", 0)
            for _ in range(3):
                reader, writer = await raw(server)
                with anyio.fail_after(3), suppress(ConnectionResetError):
                    await reader.read()
                writer.close()
        trust = Tls(ca=authority.ca) if tls else None
        async with connect(server.address, Place, tls=trust, token=SECRET) as proxy:
            assert await proxy.read(Word("x")) == Word("x")


async def test_an_end_does_not_wait_for_a_handshake(authority: Authority) -> None:
    async with place(authority.issue("127.0.0.1"), token=SECRET) as (server, _):
        reader, writer = await raw(server)
        writer.write(b"\x16\x03\x01")
        await anyio.sleep(0.1)
        begin = anyio.current_time()
    assert anyio.current_time() - begin < 0.5
    with anyio.fail_after(2):
        with suppress(ConnectionResetError):
            await reader.read()
    writer.close()


async def test_connections_that_do_not_say_who_they_are_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.rpc.server.MAX_STRANGERS", 4)
    async with place(None, "tcp://127.0.0.1:0") as (server, _):
        mute = [await raw(server) for _ in range(4)]
        await anyio.sleep(0.1)
        async with connect(server.address, Place) as proxy:
            assert await proxy.read(Word("x")) == Word("x")
        with anyio.fail_after(2):
            await mute[0][0].read()
        for _, writer in mute:
            writer.close()


async def test_the_number_of_clients_is_limited(tmp_path: Path) -> None:
    async with place(None, f"unix:{tmp_path}/s", max_connections=1) as (server, _):
        async with connect(server.address, Place) as proxy:
            await refused(server.address, Unavailable, "takes no more clients", None)
            assert await proxy.read(Word("x")) == Word("x")
        async with connect(server.address, Place) as proxy:
            assert await proxy.read(Word("x")) == Word("x")


async def test_before_the_greeting_little_is_taken_and_nothing_answered() -> None:
    async with place(None, "tcp://127.0.0.1:0", token=SECRET) as (server, _):
        for data, answer in (
            (wire.encode_head(wire.Ping(), 0, 1 << 20), b"Ping before the greeting"),
            ((wire.HANDSHAKE_LIMIT + 1).to_bytes(4, "big"), b"exceeds the limit"),
        ):
            reader, writer = await raw(server)
            writer.write(data)
            with anyio.fail_after(3):
                assert answer in await reader.read()
            writer.close()


# --- tokens change ---------------------------------------------------------------------------------------------------


async def test_a_token_file_is_rotated_under_a_running_server(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text("# since May\nfirst\n")
    theirs.write_text("first\n")
    async with place(None, f"unix:{tmp_path}/s", token=TokenFile(ours)) as (server, _):
        async with connect(server.address, Place, token=TokenFile(theirs)) as proxy:
            await proxy.read(Word("first"))
        ours.write_text("second\nfirst\n")
        for token in ("first", "second"):
            async with connect(server.address, Place, token=token):
                pass
        ours.write_text("second\n")
        await refused(server.address, Unauthorized, "the token is wrong", None, TokenFile(theirs))
        theirs.write_text("second\n")
        async with connect(server.address, Place, token=TokenFile(theirs)):
            pass
        ours.unlink()
        await refused(server.address, Unauthorized, "cannot read its token", None, TokenFile(theirs))


async def test_a_token_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE_TOKEN", "old new")
    async with place(None, f"unix:{tmp_path}/s", token=TokenVariable("PLACE_TOKEN")) as (server, _):
        async with connect(server.address, Place, token="new"):
            pass
        await refused(server.address, Unauthorized, "the token is wrong", None, "other")


@pytest.mark.parametrize("token", ["", "  ", TokenFile(Path("/dev/null")), TokenVariable("NOT_SET_ANYWHERE")])
async def test_an_empty_token_is_no_token(tmp_path: Path, token: Token) -> None:
    for side in (serve(PlaceImpl(), Place, f"unix:{tmp_path}/s", token=token), connect("unix:x", Place, token=token)):
        with pytest.raises(ValueError, match="no token in"):
            async with side:
                pass


# --- certificates change ---------------------------------------------------------------------------------------------


async def test_certificates_are_rotated_under_a_running_server(
    authority: Authority, stranger: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another authority's certificate takes the place of the first; nobody is cut off, and no half of it is taken."""
    ours = Tls(certificate=tmp_path / "server.pem", key=tmp_path / "key.pem")

    def install(issuer: Authority, *files: Path | None) -> None:
        text = (issuer.issue("127.0.0.1").certificate or Path()).read_text()
        key, _, chain = text.partition("-----BEGIN CERTIFICATE-----")
        parts = {ours.key: key, ours.certificate: "-----BEGIN CERTIFICATE-----" + chain}
        if ours.certificate in files and ours.key not in files:
            remaining["key"] = key
        for path in files:
            assert path is not None
            path.with_suffix(".new").write_text(parts[path])
            path.with_suffix(".new").replace(path)

    remaining: dict[str, str] = {}
    install(authority, ours.certificate, ours.key)
    old, new = Tls(ca=authority.ca), Tls(ca=stranger.ca)
    async with (
        place(ours, token=SECRET) as (server, _),
        connect(server.address, Place, tls=old, token=SECRET) as proxy,
    ):
        install(stranger, ours.certificate)  # the key does not belong to it
        async with connect(server.address, Place, tls=old, token=SECRET):
            pass
        await logged(capsys, "new certificates are not taken.*server.pem")
        assert ours.key is not None
        ours.key.write_text(remaining["key"])
        async with connect(server.address, Place, tls=new, token=SECRET) as other:
            assert await other.read(Word("new")) == Word("new")
        await logged(capsys, "new certificates are in use.*server.pem")
        await refused(server.address, Unauthorized, "not accepted", old, SECRET)
        assert await proxy.read(Word("old")) == Word("old")


async def test_whom_a_server_trusts_is_rotated_too(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.ca.read_bytes())
    async with place(authority.issue("127.0.0.1", ca=trusted), token=SECRET) as (server, _):
        before, after = authority.issue("c", ca=authority.ca), stranger.issue("c", ca=authority.ca)
        async with connect(server.address, Place, tls=before, token=SECRET):
            pass
        await refused(server.address, RpcError, r"want one that it knows|ALERT", after, SECRET)
        trusted.write_bytes(stranger.ca.read_bytes())
        async with connect(server.address, Place, tls=after, token=SECRET):
            pass
        await refused(server.address, RpcError, r"want one that it knows|ALERT", before, SECRET)


# --- what is logged of strangers -------------------------------------------------------------------------------------


async def test_strangers_do_not_fill_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    async with place(None, "tcp://127.0.0.1:0", token=SECRET) as (server, _):
        hello = wire.Hello(wire.VERSION, describe(Place).fingerprint, 1 << 20, "wrong")
        for _ in range(3 * BURST):
            reader, writer = await raw(server)
            writer.write(wire.encode_head(hello, 0, 1 << 20))
            with anyio.fail_after(3):
                assert b"the token is wrong" in await reader.read()
            writer.close()
        lines = [line for line in capsys.readouterr().out.splitlines() if "peer refused" in line]
        assert BURST <= len(lines) < 2 * BURST


def test_a_log_that_spares_says_what_it_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("astraflow.rpc.sparing.monotonic", lambda: now)
    log = SparingLog()
    for number in range(BURST + 7):
        log.warning("refused", number=number)
    log.warning("dropped")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == BURST + 1
    assert "dropped" in lines[-1]
    now += EVERY
    for _ in range(3):
        log.warning("refused")
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(r"left_out.*=.*7", line)
    now += 1e6
    for _ in range(2 * BURST):
        log.warning("refused")
    assert len(capsys.readouterr().out.splitlines()) == BURST


# --- what does not start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "with_tls", "token", "reason"),
    [
        ("tls://0.0.0.0:0", False, None, r"without TLS certificates and a token.*recipes certificates"),
        ("tls://0.0.0.0:0", True, None, r"without a token.*recipes certificates"),
        ("tls://0.0.0.0:0", False, SECRET, r"without TLS certificates\. "),
        ("tls://127.0.0.1:0", False, SECRET, r"without TLS certificates\. "),
        ("tcp://0.0.0.0:0", True, SECRET, r"tcp:// is not encrypted: use tls://0.0.0.0:0"),
        ("tcp://127.0.0.1:0", True, SECRET, r"tls= is for a tls:// address"),
    ],
)
async def test_a_listener_that_would_not_be_safe_does_not_start(
    authority: Authority, address: str, with_tls: bool, token: str | None, reason: str
) -> None:
    tls = authority.issue("127.0.0.1") if with_tls else None
    with pytest.raises(ValueError, match=reason):
        async with serve(PlaceImpl(), Place, address, tls=tls, token=token):
            pass


async def test_an_open_listener_starts_with_both(authority: Authority) -> None:
    async with place(authority.issue("127.0.0.1"), "tls://0.0.0.0:0", token=SECRET) as (server, _):
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        async with connect(address, Place, tls=Tls(ca=authority.ca), token=SECRET) as proxy:
            assert await proxy.read(Word("x")) == Word("x")


async def test_files_that_are_missing_or_wrong_are_named(authority: Authority, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("not a certificate")
    with pytest.raises(FileNotFoundError, match=r"absent\.pem"):
        async with serve(PlaceImpl(), Place, "tls://127.0.0.1:0", tls=Tls(certificate=tmp_path / "absent.pem")):
            pass
    with pytest.raises(ValueError, match=r"wrong.pem: not PEM"):
        async with serve(PlaceImpl(), Place, "tls://127.0.0.1:0", tls=Tls(certificate=wrong)):
            pass
    with pytest.raises(ValueError, match=r"wrong.pem: not PEM"):
        async with connect("tls://127.0.0.1:1", Place, tls=Tls(ca=wrong)):
            pass


async def test_tls_below_1_3_is_refused(authority: Authority) -> None:
    import ssl

    async with place(authority.issue("127.0.0.1"), token=SECRET) as (server, _):
        context = ssl.create_default_context(cafile=str(authority.ca))
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):  # noqa: PT011 (an alert, or a reset)
            await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]), ssl=context)
