"""Python imports this file at its start, if its folder is in PYTHONPATH: torch is not found."""

import importlib.machinery

_find_spec = importlib.machinery.PathFinder.find_spec
# a class method, as before: pytest stores it in a class of its own
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda _, name, *options: None if name == "torch" else _find_spec(name, *options)
)
