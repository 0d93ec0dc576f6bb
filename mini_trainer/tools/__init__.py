"""Programs besides the root's: started by `mini-trainer WORD`, `python -m mini_trainer WORD`, or torchrun's -m.

In: options of their own. Out: merged models, scores of a teacher, sweeps, other trainers' configurations translated, a
board of runs. Each parses its options before it imports anything slow.
"""
