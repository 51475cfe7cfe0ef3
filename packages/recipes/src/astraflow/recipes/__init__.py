"""What people run: the recipes command, its workflows, rewards and configurations."""
