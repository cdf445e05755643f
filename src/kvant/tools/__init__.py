"""What measures, predicts and prepares; nothing below imports it."""
