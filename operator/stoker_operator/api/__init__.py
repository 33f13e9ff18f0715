"""The resource users write: models, rules, and the schema generated from them. Pydantic lives here."""
