"""Memory that is scheduled with time: which programs have theirs on the GPU, and when.

Programs that together need more than there is room for have turns, in sets that fit (``sets.py``, ``turns.py``), and
what the next set lacks comes while the present one runs (``moves.py``). ``gangs.py`` says which programs are on and off
together. All of that is pure, and ``planner.py`` has it together. ``switch.py`` acts on a GPU.
"""
