"""What a run needs of a card: modelled, checked beforehand, and mended after an out-of-memory error."""
