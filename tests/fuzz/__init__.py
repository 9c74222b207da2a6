"""Damage, hostile workspaces and sequences of commands, made from a seed: `make fuzz`."""
