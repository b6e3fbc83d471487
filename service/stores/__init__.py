"""Where histories, profiles and the catalogue are kept: one protocol, several engines."""
