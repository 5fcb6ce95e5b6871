"""The wordings: short common words, five to a dozen with equal chances wherever a speaker has a choice.

A rare long word is several tokens of which only the first is uncertain, so the alternatives are plain and short.
"""

from __future__ import annotations

from spec_lab.train.corpus.phrasing import compile_rules

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
        "last": "last | to end | at the end | to close | as a last step | to finish",
        # Free prose between the steps.
        "person": "{name} | {friend} | the {role} | my {kin} | a {role} | the {adj} {role} | somebody | an old {role}",
        "role": "cook | guard | child | nurse | baker | driver | king | judge | singer | farmer | clerk | doctor",
        "kin": "mother | father | sister | brother | uncle | aunt | cousin | son | friend | boss",
        "adj": "old | new | small | big | red | cold | warm | quiet | round | long | dark | clean | plain | odd | soft | wet",
        "noun": "door | lamp | table | book | road | river | cup | clock | window | boat | stone | tree | bag | bell | coat "
        "| wall | song | letter | garden | train | key | box | chair | map",
        "does": "opens | moves | holds | likes | sees | paints | finds | drops | wants | cleans | hides | keeps | sells "
        "| draws | fixes | leaves",
        "state": "is | looks | seems | feels | was | stays | turns | remains",
        "near": "near | by | under | behind | over | beside | in | on | past | below | across from | next to",
        "how": "slowly | again | today | at last | for now | too | as ever | once more | in peace | at night | in time",
        "spot": "the {noun} | a {adj} {noun} | the {adj} {noun} | this {noun} | {place} | my {noun}",
        "think": "think | guess | bet | hope | know | fear | hear | say | feel | doubt",
        "when": "today | now | later | again | at noon | at night | in spring | for once | soon | still | each day | tonight",
        "remark": "the {adj} {noun} {near} {spot} {state} {adj} {when} | {person} {does} {spot} {how} "
        "| i {think} {person} {does} the {noun} {near} {spot} | {when} {person} {does} {spot} and {does} a {noun} "
        "| {person} {does} the {adj} {noun} and {person} {does} the {noun} {how} "
        "| {near} {spot} the {noun} {state} {adj} | the {noun} {state} {adj} and the {noun} {state} {adj} "
        "| {person} {state} {mood} {near} {spot}",
        # What the prompt said about the scene, taken up again.
        "recall": "{name} [is|feels|seems|stays|was] {mood} [so|and|but|as|while] {friend} [wants|likes|asks for|gets|needs] "
        "[the|some|more|a cup of] {drink} "
        "| [the {pet}|a {pet}|that {pet}] {state} [{near} {spot}|{adj} {when}|{adj} and {adj}] "
        "| {friend} [said|thinks|hopes|knows|feels|sees] [it is|we have|there is] {weather} [{near} {spot}|{when}|in {place}] "
        "| in {place} [it is|we get|there is|they have] {weather} {when} [and|but|so|while] {person} {state} {mood} "
        "| [some|more|a little|cold|warm|good] {drink} for {name} [and|or|but not|not] {friend} {how}",
    }
)
