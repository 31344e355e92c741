"""Random JSON schemas of the part that is enforced whole."""

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b_2", "city", "n"])
BOUND = st.integers(-30, 30)
LENGTH = st.integers(0, 4)
PATTERNS = st.sampled_from(["^[a-c]+$", "^x", "y$", "[0-9]{2}", "^(ab|c)*$", "^$"])


def pair(low, high, bounds):
    """Two keywords whose values are in order."""
    return st.tuples(bounds, bounds).map(lambda two: {low: min(two), high: max(two)})


def some(*parts):
    """One or none of the parts."""
    return st.one_of(st.just({}), *parts)


def typed(name, *parts):
    return some(*parts).map(lambda rest: {"type": name, **rest})


integers = typed("integer", pair("minimum", "maximum", BOUND), st.just({"multipleOf": 7}))
numbers = typed("number", pair("minimum", "maximum", BOUND))
strings = typed(
    "string",
    pair("minLength", "maxLength", LENGTH),
    PATTERNS.map(lambda pattern: {"pattern": pattern}),
    st.just({"format": "date"}),
)
scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["x", "", "null", "1"])
listed = st.lists(scalars, min_size=1, max_size=4).map(lambda values: {"enum": values})
leaves = st.one_of(
    integers, numbers, strings, listed, st.just({"type": "boolean"}), st.just({"type": "null"}),
    st.just({"type": ["integer", "null"], "maximum": 4}), st.just({"$ref": "#/$defs/leaf"}),
    scalars.map(lambda value: {"const": value}),
    st.sampled_from([{}, {"type": "array"}, {"type": "object"}, {"type": "array", "items": {}}]),
)  # fmt: skip


def objects(values, others=()):
    """Objects with properties; what `others` may be is one of these schemas, or false."""

    def build(parts):
        properties, required, further = parts
        schema = {"type": "object", "properties": properties, "required": sorted(required)}
        return schema | further

    properties = st.dictionaries(NAMES, values, min_size=1, max_size=3)
    further = [{}, *({"additionalProperties": other} for other in (False, *others))]
    return properties.flatmap(
        lambda known: st.tuples(
            st.just(known), st.sets(st.sampled_from(sorted(known))), st.sampled_from(further)
        )
    ).map(build)


def grown(values):
    arrays = st.tuples(values, pair("minItems", "maxItems", st.integers(0, 3)))
    return st.one_of(
        objects(values, others=(True, {"type": "boolean"})),
        arrays.map(lambda two: {"type": "array", "items": two[0], **two[1]}),
        st.lists(values, min_size=1, max_size=2).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False}
        ),
        st.lists(values, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        values.map(lambda one: {"allOf": [one], "title": "t"}),
    )


schemas = st.recursive(leaves, grown, max_leaves=6)
DEFS = {"leaf": {"type": "string", "maxLength": 2}}


def rooted(schema):
    return {**schema, "$defs": DEFS}
