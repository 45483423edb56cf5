"""The main job on real data: one device beside replicas.

`settings` is all that the command line imports before a sub-command runs.
"""
