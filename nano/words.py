"""The words that the generated tasks are about, and where the code to read comes from."""

import sysconfig
from pathlib import Path

WORDS = """
acorn actor air alarm album amber angel ant apple april apron arch arm army arrow art ash atom
aunt axe baby back bag baker ball band bank barn base bath beach bean bear bed bee bell belt
bench berry bike bird blue boat body bolt bone book boot bowl box boy brain bread brick bride
brook brush bulb bus bush butter cake calf camel camp candle cap car card cart case cat cave
chain chair chalk cheese cherry chess chin circle city clay clock cloud clown club coal coat
coin color comb cook copper coral corn cotton couch cow crab crane crow crown cup curtain desk
dice dime dirt dish doctor dog doll door dragon dream dress drum duck dust eagle ear earth east
egg elbow elm engine eye face fairy fan farm fence fern field fig film finger fire fish flag
flame flock floor flower fly fog food foot fork fox frog fruit game garden gate ghost giant
girl glass glove goat gold goose grape grass green guitar hair hall hammer hand harbor hat hawk
hay heart hen hill honey hook horn horse house ice inch ink iron island ivory jacket jam jar
jelly jewel judge juice key king kite kitten knee knife knot lake lamb lamp land leaf leg lemon
letter light lily lime lion lock log lunch map maple march mask meal melon milk mint mirror moon
moss moth mouse mouth nail neck needle nest net night north nose note nut oak oar ocean olive
onion orange otter oven owl paint palm pan paper park peach pear pen pig pilot pine pipe plane
plant plum pond pony pool pot prince purple queen quilt rabbit rail rain red ring river road
robin rock roof room root rope rose salt sand school scarf sea seed sheep shelf ship shirt shoe
silk silver sister sky sled smoke snail snow soap sock soup south spade spoon spring star steam
stone storm stove sugar summer sun swan table tail tea tent thumb tiger toad tooth tower toy
train tree truck tulip uncle valley vase vest violin wagon wall water wave wax west whale wheat
wheel willow wind window wine wing winter wolf wood wool worm wren yard yarn year zebra zinc
""".split()

NAMES = """
Ada Alan Amy Anna Ben Bob Carl Clara Dan Dora Emil Emma Eva Finn Gina Grace Hans Hugo Ida Ivan Jack
Jane Karl Kate Lena Leo Lisa Luis Maria Max Mia Nina Noah Nora Olga Oscar Otto Paul Rita Rosa Sam
Sara Sven Theo Tina Tom Vera Wendy Will Zoe
""".split()

CITIES = (
    """
Amsterdam Athens Berlin Bern Bonn Boston Cairo Chicago Dublin Geneva Hamburg Kyiv Lagos Lima Lisbon
London Lyon Madrid Milan Moscow Munich Nairobi Oslo Paris Prague Quito Riga Rome Seoul Sofia Tokyo
Toronto Turin Vienna Warsaw Zurich
""".split()
    + ["New York", "San Francisco", "Los Angeles", "New Delhi"]
)

# Tests, tables of character sets, examples and bundled wheels say little about code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings",
            "pydoc_data", "ensurepip", "turtledemo", "idlelib", "lib2to3", "__phello__"}  # fmt: skip
SMALLEST_FILE = 1_000


def read_code() -> dict[str, str]:
    """The sources of Python's standard library, by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT.isdisjoint(name.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) >= SMALLEST_FILE:
                files[str(name)] = text
    return files
