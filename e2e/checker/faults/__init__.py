"""The disturbances of a run, one per command of the checker."""
