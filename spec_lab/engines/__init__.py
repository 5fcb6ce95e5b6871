"""Other engines, each in a process of its own: what they can be asked for, and how they count.

`plan.py` decides before anything loads. `process.py` starts `worker.py` with the Python of an engine's environment, and
talks to it in JSON lines. A file an engine has its row of the table of knobs (`KNOBS`), what it is asked for
(`settings`), and, for the worker, `ENGINE` with its `generate`.

The lab imports no engine. What a worker imports from this folder (a file an engine, `plan.py`, `streams.py`) imports
nothing of `spec_lab`, since the engine's environment may lack it.
"""
