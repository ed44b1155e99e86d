"""What a training worker does with nemo_automodel: build, forward, backward, save. `draft/` trains the draft."""
