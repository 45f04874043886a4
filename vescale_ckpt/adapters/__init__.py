"""Adapters: modules, optimizers, DTensors and plain values to tensor leaves with boxes, and back."""
