"""What a finished run says of raw data: scores, the next items of users, candidates of a question, embeddings."""
