"""Prompts for heads where writing them by the model costs too much, as on a CPU: patterns, filled with words.

    python scripts/smollm2_prompts.py NUMBER > prompts.jsonl

They go into `python -m spec_lab.train.texts prompts=[prompts.jsonl]`. Texts to be summed up are pages of this project.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

TOPICS = (
    "the moon,rivers,the printing press,honey bees,volcanoes,democracy,jazz,chess,the human heart,glaciers,bread,silk,"
    "railways,whales,the Roman army,photosynthesis,electric cars,tides,coffee,vaccines,inflation,Shakespeare,dinosaurs,"
    "bridges,the Internet,solar power,opera,deserts,trade unions,gravity,chocolate,lighthouses,microscopes,owls,"
    "earthquakes,bicycles,tea,the Renaissance,black holes,batteries,rain forests,money,libraries,antibiotics,football,"
    "sleep,paper,ants,the French Revolution,recycling,wolves,cheese,magnets,maps,the stock market,elephants,radio,"
    "DNA,castles,memory,clouds,steel,penguins,the Silk Road,algebra,sharks,poetry,water mills,atoms,cities,dreams,"
    "the Olympic Games,salt,telescopes,languages,coral reefs,cotton,computers,teeth,mountains,friendship,spices,"
    "airships,the brain,clocks,horses,theatre,plastics,lightning,gardens,the United Nations,music,robots,milk"
)
PEOPLE = "a teacher,a nurse,a pirate,my boss,a tour guide,a farmer,a detective,a lawyer,a chef,a grandmother,a poet"
NAMES = "Anna,Ben,Clara,David,Emma,Felix,Grace,Henry,Ida,Jack,Lena,Max,Nora,Oscar,Paula,Rosa,Sam,Tom,Vera,Will"
THINGS = "apples,books,marbles,tickets,pencils,cakes,stamps,eggs,bottles,chairs,cards,shirts,flowers,coins,boxes"
PLACES = (
    "Portugal,Kenya,Japan,Peru,Norway,Egypt,Canada,Vietnam,Greece,Iceland,Mexico,India,Scotland,Chile,Poland,Morocco"
)
TASKS = (
    "reverses a string,finds the largest number of a list,counts the words of a file,checks for a palindrome,sorts a "
    "list of names,computes the factorial,merges two sorted lists,removes duplicates,sums the digits of a number,finds "
    "all primes below n,reads a CSV file,parses a date,draws a random card,implements a stack,computes a mean,converts "
    "Celsius to Fahrenheit,finds the shortest word,flattens a nested list,validates an email address,downloads a page"
)
LANGUAGES = "Python,Java,C++,JavaScript,Go,Rust"
GERMAN = (
    "der Hund,die Katze,das Haus am See,die Regierung,der alte Mann,meine Schwester,das Wetter,die Zeitung,der Bahnhof,"
    "unsere Lehrerin,das Kind,der Minister,die Firma,das Konzert,der Arzt"
)
VERBS = (
    "ist heute sehr ruhig,war gestern in der Stadt,kommt aus einem kleinen Dorf,hat das Buch nicht gelesen,braucht "
    "mehr Zeit,steht neben der Kirche,wird im Sommer wieder da sein,sprach lange mit den Nachbarn,kostet zu viel Geld"
)
PATTERNS: dict[str, tuple[str, ...]] = {
    "writing": (
        "Write a short essay about {topic}.",
        "Write a poem about {topic} and {topic2}.",
        "Compose a travel blog post about a week in {place}, with food and sights.",
        "Write a story in which {name} learns something about {topic}.",
        "Draft a short email to {person} about a meeting on {topic}.",
        "Give me five titles for an article about {topic}.",
    ),
    "roleplay": (
        "Pretend to be {person} and tell me about {topic}.",
        "You are {person}. I ask you what you think of {topic}. What do you say?",
        "Imagine a talk between {person} and {person2} about {topic}. Write it down.",
    ),
    "reasoning": (
        "{name} is older than {name2}, and {name2} is older than {name3}. Who is the youngest? Explain.",
        "Are {topic} or {topic2} more important for {place}? Give reasons for both sides.",
        "If all {things} are red and {name} has one of them, what colour is it? Why?",
    ),
    "math": (
        "{name} has {a} {things} and buys {b} more. Then {c} of them are given to {name2}. How many are left?",
        "A box holds {b} {things}. {name} fills {c} boxes and has {a} {things} left over. How many were there?",
        "{name} earns {a} dollars an hour and works {b} hours a week. How much is that in {c} weeks?",
        "A train goes {a} km in {c} hours. How far does it go in {b} hours at the same speed?",
        "{name} reads {b} pages a day. A book has {a} pages. How many pages are left after {c} days?",
        "Solve for x: {c}x + {b} = {a}.",
        "What is {a} times {b}, minus {c}?",
    ),
    "coding": (
        "Write a function in {language} that {task}.",
        "Explain step by step how a program in {language} {task}.",
        "Show me a test for a {language} function that {task}.",
    ),
    "extraction": (
        "List the names and numbers in this text as JSON: {name} bought {a} {things} in {place} on {b} May, and "
        "{name2} sold {c} {things2} there.",
        "Which countries are named here? {name} flew from {place} to {place2} to talk about {topic}.",
    ),
    "stem": (
        "What are {topic}, and how do they work?",
        "Explain {topic} to a child of {c} years.",
        "What is the link between {topic} and {topic2}?",
    ),
    "humanities": (
        "How did {topic} change the history of {place}?",
        "What would {person} say about {topic} in {place}? Compare it with {place2}.",
        "Give three arguments for and three against {topic}.",
    ),
    "translation": (
        "Translate German to English: {german} {verb}.",
        "Translate into English: {german} {verb}, aber {german2} {verb2}.",
    ),
    "qa": (
        "What is the capital of {place}, and what is it known for?",
        "When did people first know {topic}?",
        "Who is known for work on {topic}?",
        "Where are {topic} found in {place}?",
        "how many {things} are made in {place} in a year",
        "Tell me {c} facts about {topic}.",
    ),
    "summarization": ("Summarize: {page}", "Give the key points of this text.\n\n{page}"),
    "rag": ("Read this and say in one sentence what it says about {topic}, if anything:\n{page}\nAnswer:",),
}
MOST_PAGE_CHARACTERS = 1400


def passages() -> list[str]:
    """Return the paragraphs of this project's pages, as they stand."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    joined = [" ".join(part.split()) for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    return [part for part in joined if len(part) > 120 and "|" not in part and "`" not in part[:3]]


def filler(draw: random.Random, pages: list[str]) -> dict[str, object]:
    """Draw what the patterns may name."""

    def page() -> str:
        first = draw.randrange(len(pages))
        return " ".join(pages[first : first + draw.randint(1, 4)])[:MOST_PAGE_CHARACTERS]

    kinds: dict[str, Callable[[], object]] = {
        "page": page,
        "a": lambda: draw.randint(20, 400),
        "b": lambda: draw.randint(4, 40),
        "c": lambda: draw.randint(2, 9),
    }
    words = {"topic": TOPICS, "person": PEOPLE, "name": NAMES, "things": THINGS, "place": PLACES, "task": TASKS}
    words |= {"language": LANGUAGES, "german": GERMAN, "verb": VERBS}
    found: dict[str, object] = {kind: make() for kind, make in kinds.items()}
    for name, choices in words.items():
        first, second, third = draw.sample(choices.split(","), 3)
        found |= {name: first, f"{name}2": second, f"{name}3": third}
    return found


def main(number: int) -> None:
    """Print so many prompts, an equal number of each category, as JSON Lines."""
    draw, pages, categories = random.Random(0), passages(), list(PATTERNS)
    for index in range(number):
        category = categories[index % len(categories)]
        said = draw.choice(PATTERNS[category]).format(**filler(draw, pages))
        line = {"id": f"{category}-{index:06d}", "category": category, "prompt": said[:1].upper() + said[1:]}
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main(int(sys.argv[1]))
