"""The only room that knows transformers' internals: version differences, registration, the Cache, model facts."""
