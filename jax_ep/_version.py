"""The version, stated once: pyproject.toml reads it here, so it is known without an installation."""

__version__ = "0.1.0.dev0"
