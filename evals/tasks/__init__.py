"""Tasks that need no hub: generators of samples, each independent of every model but for its tokenizer."""
