"""Bridges to other libraries; each optional, imported by name where it is needed."""
