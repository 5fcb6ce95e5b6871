"""The alternative wordings: each rule has four to twelve, mostly short common words, with equal probability.

The words are short since a rare long word has several tokens, and only the first of these is uncertain.
"""

from __future__ import annotations

from spec_lab.corpus.phrasing import compile_rules

RULES = compile_rules(
    {
        # Small words that open and join the steps of a thought.
        "so": "so | now | then | well | right | okay | fine | next | good | here | and so | after that",
        "start": "okay | right | well | so | let me see | hmm | fine | good | now | alright | first | yes",
        "makes": "makes | gives | leaves | means | is | brings | yields | comes to | turns into | gets us to",
        "have": "have | hold | keep | get | find | see | count | reach | note | write | land at | end at",
        "check": "sure | fine | good | nice | easy | done | clear | okay | not bad | as hoped | simple | noted",
        "with": "with | using | given | from | having | taking",
        "that": "that | this | it | which",
        "add": "add | plus | put in | throw in | join | with | and | take in | count in",
        "drop": "drop | minus | less | take off | lose | without | cut | remove | take out",
        "first": "first | to begin | at the start | as a start | before all | to open",
        # Small words of the remarks.
        "is": "is | looks | seems | feels | was | stays | turns | remains",
        "likes": "likes | wants | sees | keeps | takes | moves | needs | loves | finds",
        "near": "near | by | under | behind | over | beside | in | on | past | below | next to",
        "think": "think | guess | bet | hope | know | fear | hear | say | feel | doubt",
        "again": " | again | today | at last | for now | too | as ever | once more | at night | in time | still",
    }
)

# Remarks use facts of the scene, and the prompt states some of these. So greedy thinking depends on its own prompt.
# When nouns and adjectives were drawn freely, the thinking repeated the most likely sentence of the corpus.
REMARKS = (
    "the {item} {is} {look}[| {again}]",
    "the {other_item} {is} {other_look}[ but not {look}| and not {look}|, i {think}|]",
    "{friend} {likes} the {look} {item}[| {again}]",
    "{name} {likes} the {item} {near} the {other_item}[| {again}]",
    "i {think} {name} {likes} the {other_look} {other_item}",
    "{name} {is} {mood}[| {again}] [so|and|but|as|while] {friend} {likes} [the|some|more|a cup of] {drink}",
    "[the|a|that|this] {pet} {is} [{near} the {item}|{look}|{other_look}]",
    "{friend} [said|thinks|hopes|knows|feels|sees] [it is|we have|there is] {weather} in {place}",
    "in {place} [it is|we get|there is|they have] {weather} [and|but|so|while] {name} {is} {mood}",
    "[some|more|a little|cold|warm|good] {drink} for {name} [and|or|but not|not] {friend} {again}",
)
