"""The records of the stress tool as a page for a browser."""

from .page import write_html

__all__ = ["write_html"]
