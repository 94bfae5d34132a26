"""The nouns: frozen, strict values that every room speaks. No torch here."""
