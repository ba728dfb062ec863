"""Long trainings, and trainings with many failures, each step checked.

`python -m stress hammer` and `python -m stress soak`.
"""
