"""Layouts: how a mesh of ranks holds one tensor, turned into boxes. Pure."""
