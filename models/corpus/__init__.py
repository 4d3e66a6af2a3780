"""The training corpus: seeded generators of stories, conversations and questions. No outside text goes in."""
