"""Models of block drafters: bodies, and the heads that turn their slots into drafts."""
