"""Faults at named points of the write path, inside the processes of a system, without a hook in its code.

inject/sitecustomize.py   Python runs it at the start of every process with its folder on PYTHONPATH
injected.py               installs the points, a recorder of stale work, and a mutant if one is wanted
patching.py               changes a module when it is imported
fault_points.py           kills before or after the nth call of a point, or loses its reply
recorder.py               records which commits and steps were offered, and their results
mutants.py                Orca without one of its rules: the checker must find each
names.py                  the points and the actions, for both sides

Both sides share a folder (ORCA_CHECKER_INJECT). The checker writes the file `armed` there. The first process at the
point renames it to `fired`, which only one process can do, and acts. Records are in `records/<part>-<pid>.jsonl`.
"""
