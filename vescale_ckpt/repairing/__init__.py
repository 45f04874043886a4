"""Repairing: all objects of a store looked at and held against one another, and made anew from what is left of them."""
