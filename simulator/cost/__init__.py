"""How long passes take on an accelerator."""
