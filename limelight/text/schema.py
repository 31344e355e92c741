"""How the schemas of a tool's parameters lead to each other."""

UNIONS = ("anyOf", "oneOf", "allOf")
MOST_SCHEMAS = 200  # that are looked at for the types of one value


def leads_to(schema: dict[str, object], root: object) -> list[object]:
    """What a schema refers to within `root` (#/$defs/name), and what it chooses from or joins."""
    reference = schema.get("$ref")
    found = [_referred(reference, root)] if isinstance(reference, str) else []
    for union in UNIONS:
        if isinstance(listed := schema.get(union), list):
            found += listed
    return found


def _referred(reference: str, root: object) -> object:
    """What a local reference points to; None for any other."""
    if not reference.startswith("#"):
        return None
    found = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, dict) else None
    return found
