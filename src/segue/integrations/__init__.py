"""Other engines and clusters. For several of them: `prompt_claim` digests what both sides of a hand-off must
have alike, `served_weights` the weights that an engine serves."""
