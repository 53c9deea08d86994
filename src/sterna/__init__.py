"""Sterna: an LLM serving engine. A request is a round trip; see docs/architecture.md."""

__version__ = "0.1.0"
