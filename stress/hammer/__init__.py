"""Real allocator failures by the thousand, at random places: `python -m stress hammer`. `job.py` strikes and checks, `blows.py` says where."""
