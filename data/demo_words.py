"""The words of the embedded corpus: eight topics, the words that several of them share, and words of none.

Shared words are true ambiguities of English (a *root* of a plant, a tooth, a file system). Topics that share
are mostly far apart by name, so that label groups cut from the sorted names are rivals for the same texts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """The words that fill the slots of a sentence."""

    people: tuple[str, ...]
    """Persons: after `the`."""
    deeds: tuple[str, ...]
    """Transitive verbs, past tense."""
    things: tuple[str, ...]
    """What: after `the`, or after `the` and an adjective."""
    places: tuple[str, ...]
    """Where: a whole phrase."""


def _items(listed: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in listed.split(","))


TOPICS: dict[str, Words] = {
    "banking": Words(
        people=_items("cashier, lender, banker, broker, investor, treasurer, borrower, auditor, shareholder, saver"),
        deeds=_items(
            "refinanced, invested, withdrew, underwrote, repaid, lent, audited, overdrew, reimbursed, sold short"
        ),
        things=_items(
            """mortgage, loan, overdraft, dividend, pension, currency, inflation, savings plan, exchange rate, budget,
            debt, equity, credit limit, bankruptcy, cheque, payroll, portfolio, collateral, invoice, tax return"""
        ),
        places=_items(
            "at the counter, in the vault, on the stock exchange, in the ledger, at the cash machine, in the treasury"
        ),
    ),
    "computing": Words(
        people=_items("programmer, hacker, developer, administrator, data engineer, webmaster, coder, tester, gamer"),
        deeds=_items(
            "debugged, uploaded, encrypted, rebooted, installed, downloaded, formatted, programmed, backed up, deleted"
        ),
        things=_items(
            """laptop, password, software, database, browser, compiler, algorithm, spreadsheet, website, firewall,
            processor, download, router, operating system, pixel, inbox, cursor, search engine, web page, hard disk"""
        ),
        places=_items(
            "in the data centre, on the screen, in the cloud, on the desktop, in the source folder, on the network"
        ),
    ),
    "cooking": Words(
        people=_items("chef, baker, cook, waiter, pastry chef, butcher, dishwasher, grocer, caterer, food critic"),
        deeds=_items("fried, simmered, seasoned, baked, peeled, chopped, roasted, kneaded, whisked, marinated"),
        things=_items(
            """onion, sauce, recipe, frying pan, oven, dough, soup, butter, flour, garlic, omelette, noodle, pastry,
            dessert, salad, breakfast, spice, stew, lemon, gravy"""
        ),
        places=_items(
            "in the kitchen, on the stove, at the dinner table, in the saucepan, in the fridge, on the cutting board"
        ),
    ),
    "football": Words(
        people=_items("goalkeeper, striker, referee, midfielder, coach, winger, supporter, captain, substitute, scout"),
        deeds=_items("tackled, headed, kicked, dribbled past, fouled, substituted, marked, outran, passed, booked"),
        things=_items(
            """goal, ball, league, free kick, offside trap, stadium, whistle, jersey, equaliser, throw-in, tournament,
            half-time lead, yellow card, crossbar, derby, fixture, squad, dressing room, touchline, championship"""
        ),
        places=_items(
            "in the penalty area, at the stadium, on the left wing, in extra time, in the second half, on the terraces"
        ),
    ),
    "gardening": Words(
        people=_items(
            "gardener, florist, botanist, landscaper, beekeeper, orchard owner, groundskeeper, seed merchant"
        ),
        deeds=_items("watered, pruned, weeded, planted, mulched, mowed, raked, fertilised, dug up, sowed"),
        things=_items(
            """lawn, rose, flower, compost, shrub, tulip, soil, greenhouse, weed, wheelbarrow, orchard, blossom,
            seedling, fertiliser, ivy, shovel, sunflower, petal, lavender, watering can"""
        ),
        places=_items(
            "in the garden, in the flower pot, under the apple tree, on the allotment, behind the shed, in the shade"
        ),
    ),
    "law": Words(
        people=_items("judge, lawyer, defendant, witness, prosecutor, attorney, plaintiff, juror, bailiff, notary"),
        deeds=_items(
            "prosecuted, acquitted, testified about, sued, convicted, cross-examined, ruled on, pleaded, swore"
        ),
        things=_items(
            """verdict, lawsuit, contract, evidence, crime, statute, jury, testimony, prison term, legislation,
            alibi, constitution, subpoena, perjury, custody, felony, guilt, copyright, ordinance, confession"""
        ),
        places=_items(
            "in the courtroom, before the magistrate, in prison, under oath, in the witness box, at the tribunal"
        ),
    ),
    "medicine": Words(
        people=_items("doctor, nurse, patient, surgeon, pharmacist, paramedic, dentist, therapist, midwife, physician"),
        deeds=_items(
            "diagnosed, vaccinated, prescribed, healed, bandaged, resuscitated, sedated, inoculated, relieved"
        ),
        things=_items(
            """fever, vaccine, symptom, surgery, diagnosis, blood pressure, prescription, antibiotic, wound, ambulance,
            stethoscope, infection, disease, heart, kidney, asthma, syringe, headache, allergy, fracture"""
        ),
        places=_items(
            "in the hospital, at the clinic, in the ward, in the emergency room, at the bedside, in the waiting room"
        ),
    ),
    "music": Words(
        people=_items(
            "singer, pianist, composer, drummer, violinist, guitarist, conductor, soprano, cellist, listener"
        ),
        deeds=_items("sang, composed, rehearsed, tuned, hummed, improvised, strummed, serenaded, whistled, harmonised"),
        things=_items(
            """melody, song, orchestra, violin, piano, guitar, concerto, rhythm, choir, chord, lyric, symphony, trumpet,
            ballad, tempo, opera, flute, encore, jazz tune, microphone"""
        ),
        places=_items(
            "on stage, in the concert hall, at the rehearsal, in the recording studio, in the choir loft, at the gig"
        ),
    ),
}


SHARED_PEOPLE: dict[str, tuple[str, ...]] = {
    "agent": ("banking", "football", "music"),
    "partner": ("banking", "law"),
    "client": ("banking", "computing", "law"),
    "server": ("computing", "cooking"),
    "host": ("computing", "cooking", "medicine"),
    "operator": ("computing", "medicine"),
    "player": ("computing", "football", "music"),
    "defender": ("football", "law"),
    "trainee": ("banking", "cooking", "medicine"),
    "counsellor": ("banking", "law"),
    "nursery worker": ("gardening", "medicine"),
    "soloist": ("football", "music"),
    "surveyor": ("banking", "gardening"),
}


SHARED_DEEDS: dict[str, tuple[str, ...]] = {
    "charged": ("banking", "law"),
    "transferred": ("banking", "football", "medicine"),
    "settled": ("banking", "law"),
    "dressed": ("cooking", "medicine"),
    "treated": ("gardening", "medicine"),
    "scanned": ("computing", "medicine"),
    "recorded": ("computing", "music"),
    "defended": ("football", "law"),
    "dismissed": ("football", "law"),
    "beat": ("cooking", "football", "music"),
    "cut": ("cooking", "gardening", "medicine"),
    "scored": ("football", "music"),
    "restored": ("computing", "medicine"),
    "processed": ("banking", "cooking", "law"),
    "signed": ("banking", "football", "law"),
    "played": ("football", "music"),
    "patched": ("computing", "gardening", "medicine"),
    "executed": ("computing", "law"),
    "examined": ("banking", "law", "medicine"),
    "struck": ("football", "law", "music"),
    "compiled": ("computing", "law"),
    "performed": ("medicine", "computing", "music"),
    "released": ("computing", "football", "law", "music"),
    "grew": ("banking", "gardening"),
}


SHARED_THINGS: dict[str, tuple[str, ...]] = {
    "appeal": ("football", "law"),
    "arrangement": ("gardening", "music"),
    "bank": ("banking", "gardening"),
    "bar": ("cooking", "law", "music"),
    "bass": ("cooking", "music"),
    "bed": ("gardening", "medicine"),
    "bench": ("football", "law"),
    "bill": ("banking", "law"),
    "bond": ("banking", "law"),
    "branch": ("banking", "computing", "gardening"),
    "bug": ("computing", "gardening"),
    "case": ("computing", "law", "medicine"),
    "cell": ("gardening", "law", "medicine"),
    "charge": ("banking", "law"),
    "chip": ("computing", "cooking"),
    "clause": ("banking", "law"),
    "code": ("computing", "law"),
    "cookie": ("computing", "cooking"),
    "course": ("cooking", "medicine"),
    "culture": ("cooking", "medicine"),
    "defence": ("football", "law"),
    "dip": ("banking", "cooking"),
    "dressing": ("cooking", "medicine"),
    "drop": ("banking", "cooking", "medicine"),
    "file": ("computing", "law"),
    "fork": ("computing", "cooking", "gardening"),
    "graft": ("gardening", "medicine"),
    "growth": ("banking", "gardening", "medicine"),
    "hedge": ("banking", "gardening"),
    "injury": ("football", "medicine"),
    "interest": ("banking", "law"),
    "jam": ("cooking", "music"),
    "key": ("computing", "music"),
    "keyboard": ("computing", "music"),
    "licence": ("computing", "law"),
    "loop": ("computing", "music"),
    "match": ("computing", "football"),
    "memory": ("computing", "medicine"),
    "menu": ("computing", "cooking"),
    "mould": ("cooking", "gardening", "medicine"),
    "net": ("computing", "football"),
    "note": ("banking", "music"),
    "nursery": ("gardening", "medicine"),
    "patch": ("computing", "gardening", "medicine"),
    "penalty": ("football", "law"),
    "pitch": ("football", "music"),
    "port": ("computing", "cooking"),
    "protocol": ("computing", "medicine"),
    "pulse": ("cooking", "medicine", "music"),
    "record": ("computing", "football", "law", "music"),
    "recovery": ("computing", "football", "medicine"),
    "register": ("computing", "music"),
    "roll": ("cooking", "music"),
    "root": ("computing", "gardening", "medicine"),
    "scale": ("banking", "cooking", "music"),
    "scan": ("computing", "medicine"),
    "score": ("football", "music"),
    "season": ("football", "gardening", "music"),
    "settlement": ("banking", "law"),
    "shot": ("football", "medicine"),
    "spread": ("banking", "cooking"),
    "statement": ("banking", "law"),
    "stem": ("gardening", "medicine", "music"),
    "stock": ("banking", "cooking"),
    "string": ("computing", "music"),
    "tablet": ("computing", "medicine"),
    "temperature": ("cooking", "gardening", "medicine"),
    "transfer": ("banking", "football"),
    "treatment": ("gardening", "medicine"),
    "tree": ("computing", "gardening"),
    "trial": ("football", "law", "medicine"),
    "trust": ("banking", "law"),
    "virus": ("computing", "medicine"),
    "yield": ("banking", "gardening"),
}


SHARED_PLACES: dict[str, tuple[str, ...]] = {
    "at the bank": ("banking", "gardening"),
    "at the bar": ("cooking", "law", "music"),
    "at the branch": ("banking", "gardening"),
    "in the bed": ("gardening", "medicine"),
    "in the box": ("football", "law"),
    "in the cell": ("computing", "law", "medicine"),
    "in the field": ("computing", "football", "gardening"),
    "in the final": ("football", "music"),
    "in the memory": ("computing", "medicine"),
    "in the nursery": ("gardening", "medicine"),
    "in the tray": ("computing", "cooking", "gardening"),
    "on the bench": ("football", "law"),
    "on the menu": ("computing", "cooking"),
    "on the pitch": ("football", "music"),
    "on the record": ("football", "law", "music"),
    "on the register": ("banking", "law", "music"),
    "on the stand": ("football", "law", "music"),
    "on the table": ("computing", "cooking", "football"),
    "under treatment": ("gardening", "medicine"),
}


ANYWHERE = Words(
    people=_items(
        """neighbour, cousin, colleague, visitor, stranger, teacher, friend, reporter, student, volunteer, newcomer,
        guest, assistant, old man, young woman, twins, committee, family, owner, apprentice"""
    ),
    deeds=_items(
        """mentioned, noticed, forgot, wanted, described, remembered, ignored, praised, discussed, checked, moved,
        found, lost, replaced, prepared, asked about, brought, explained, kept, showed"""
    ),
    things=_items(
        """plan, idea, box, letter, picture, story, problem, list, question, bag, door, photograph, paper, answer,
        mistake, surprise, result, reason, chair, newspaper"""
    ),
    places=_items(
        """by the window, near the station, in the hall, behind the building, at home, across the street, on the corner,
        in the city, on the way back, at the office, by the river, in the next room"""
    ),
)


TIMES = _items(
    """on Monday, on Friday, last week, last spring, after the storm, before noon, in the end, this year, one evening,
    after a long delay, in the early morning, two days later, once again, in the meantime, during the summer"""
)


ADJECTIVES = _items(
    """new, old, small, late, expensive, heavy, difficult, simple, strange, missing, fresh, large, second, famous, poor,
    quiet, familiar, broken, local, last"""
)
