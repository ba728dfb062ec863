"""An optimizer step that is done whole or not at all."""
