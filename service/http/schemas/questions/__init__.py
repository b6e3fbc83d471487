"""Wire types of questions, and how they become queries of the domain."""
