"""What a split should cost, by formula. Only `calibrate` measures; nothing here imports torch when loaded."""
