"""The disturbances of a run, one for each command of the checker."""
