"""Staging: device or live memory to reused host buffers."""
