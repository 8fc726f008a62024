"""Proves Orca's promise from the outside: any process may die, and no accepted request is lost, no token repeated,
skipped or revised. README.md describes how. Nothing here imports `orca`."""
