"""Memory turns: decide which programs have their memory on the GPU, and when.

Programs that together need more memory than there is room for take turns, in sets that fit (``sets.py``, ``turns.py``).
While one set runs, the memory that the next one lacks is fetched (``moves.py``). ``gangs.py`` says which programs are
on and off together. All of these are pure; ``planner.py`` combines them, and ``switch.py`` acts on a GPU.
"""
