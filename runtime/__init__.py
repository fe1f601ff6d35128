"""An LLM serving runtime whose every component is a supervised actor."""

__version__ = "0.1.0"
