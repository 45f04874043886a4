"""The vescale-ckpt command."""
