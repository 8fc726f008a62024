"""Faults at named points of the write path, done inside the processes of a system, without a hook in its code.

inject/sitecustomize.py   Python runs it at the start of every process that has its folder on PYTHONPATH
injected.py               what it installs: points, a recorder of stale work, a mutant where one is asked for
patching.py               changes a module when it is imported, and none that is not
fault_points.py           kill before or after the nth call of a point, or lose its reply
recorder.py               which commits and steps were offered, and what became of them
mutants.py                Orca without one of its rules: the checker must find each
names.py                  the points and the actions, for both sides

A folder (ORCA_CHECKER_INJECT) joins both sides. The checker writes the file `armed` there; the first process that comes
to the point renames it to `fired`, which only one can, and acts. Records lie in `records/<part>-<pid>.jsonl`.
"""
