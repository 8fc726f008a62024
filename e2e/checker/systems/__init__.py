"""A real Orca on one machine: starts it, inspects it and ends it."""
