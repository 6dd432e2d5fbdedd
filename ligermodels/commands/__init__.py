"""The commands of `ligermodels`, one module each: HELP, `arguments(command)`, `run(arguments)`.

They turn arguments into calls and results into text. What a user did wrong is a LigerError, which
`ligermodels.cli` shows in one line. Nothing heavy is imported before a command runs.
"""
