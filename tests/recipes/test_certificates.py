"""The certificates that the command writes: private where they must be, one CA, and enough for TLS."""

from __future__ import annotations

import asyncio
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from cryptography import x509
from rich.console import Console

from astraflow.dataflow import Control, DataflowService, Empty
from astraflow.recipes.certificates import write_certificates
from astraflow.recipes.cli import command
from astraflow.recipes.config import ConfigError
from astraflow.recipes.credentials import credentials_of
from astraflow.rpc import Unauthorized, connect


def test_the_private_files_are_the_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "tls"
    written = write_certificates(directory, ["trainer.example.org", "10.0.0.7"], days=30)
    assert sorted(written) == sorted(directory.iterdir())
    private = {path.name for path in written if stat.S_IMODE(path.stat().st_mode) == 0o600}
    assert private == {"ca-key.pem", "server-key.pem", "client-key.pem", "token"}
    certificate = x509.load_pem_x509_certificate((directory / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "trainer.example.org" in names.get_values_for_type(x509.DNSName)
    assert "10.0.0.7" in map(str, names.get_values_for_type(x509.IPAddress))


def test_again_renews_under_the_same_authority(tmp_path: Path) -> None:
    write_certificates(tmp_path, [], days=30)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_certificates(tmp_path, ["other.example.org"], days=30)
    same = {name for name, data in before.items() if (tmp_path / name).read_bytes() == data}
    assert same == {"ca.pem", "ca-key.pem", "token"}


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="want a name or an IP address"):
        write_certificates(tmp_path / "a", ["https://example.org"], days=30)
    write_certificates(tmp_path / "b", [], days=30)
    (tmp_path / "b" / "ca-key.pem").unlink()
    with pytest.raises(ConfigError, match="cannot be used"):
        write_certificates(tmp_path / "b", [], days=30)


def test_the_chain_passes_the_strictest_check(tmp_path: Path) -> None:
    """Both handshakes in memory, with the checks that Python 3.13 makes by default."""
    write_certificates(tmp_path, [], days=30)
    contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)]
    for context, role in zip(contexts, ("client", "server"), strict=True):
        context.load_cert_chain(tmp_path / f"{role}.pem", tmp_path / f"{role}-key.pem")
        context.load_verify_locations(tmp_path / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    ahead, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts[0].wrap_bio(back, ahead, server_hostname="localhost")
    server = contexts[1].wrap_bio(ahead, back, server_side=True)
    done = set()
    for side in (client, server, client, server):
        try:
            side.do_handshake()
            done.add(side)
        except ssl.SSLWantReadError:
            pass
    assert done == {client, server}


@pytest.mark.slow
async def test_a_dataflow_is_served_and_joined_over_tls(tmp_path: Path) -> None:
    tls, runs = tmp_path / "tls", tmp_path / "runs"
    command(["certificates", str(tls), "--host", "localhost", "10.0.0.7"], Console())
    recipes = [sys.executable, "-m", "astraflow.recipes"]
    prepare = [*recipes, "math-multi-agent", "--preset", "tiny", "--out", str(runs), "--print-commands"]
    await asyncio.to_thread(subprocess.run, prepare, check=True, capture_output=True)
    options = ["--run", str(next(runs.iterdir())), "--listen", "tls://0.0.0.0:0", "--tls", str(tls)]
    child = await asyncio.create_subprocess_exec(
        *recipes, "serve", "dataflow", *options, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        with anyio.fail_after(60):
            line = (await child.stdout.readline()).decode()
        address = line.removeprefix("dataflow at ").strip().replace("0.0.0.0", "localhost")
        known = credentials_of("client", tls, None)
        with pytest.raises(Unauthorized, match="a token is required"):
            async with connect(address, DataflowService, tls=known.tls):
                pass
        async with connect(address, DataflowService, tls=known.tls, token=known.token) as dataflow:
            assert (await dataflow.status(Empty())).phase != "finished"
            await dataflow.control(Control(phase="finished"))
    finally:
        child.terminate()
        with anyio.fail_after(30):
            await child.wait()
