#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Long-range recall: the training sequences with facts and repeats, and the evaluation set.

A fact is a line such as "The code of Velmora is 48213." that stands twice in a sequence, the second
time a known number of bytes later; the value cannot be guessed, only remembered.  A repeat is a
passage of the text itself that stands twice.  All is seeded; the same seed gives the same bytes.

As a program it writes the evaluation set, one JSON object a line: kind, distance, prompt, answer.
"""
import argparse
import json
import math
import os
import random

DISTANCES = (256, 512, 1024, 2048, 4000)
CONSONANTS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z",
              "br", "dr", "gr", "kr", "th", "st", "sh", "tr")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
ENDS = ("n", "r", "s", "l", "m", "th", "nd", "x", "")
LEAD, MIDDLE = "\nThe code of ", " is "


def make_fact(rng):
    """A name, and the five digits of its code."""
    name = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 3))))
    return (name + rng.choice(ENDS)).capitalize(), f"{rng.randrange(100000):05d}"


def snap(text, at):
    """The position after the first space at or after at, so that inserts do not cut words."""
    found = text.find(b" ", at, at + 40)
    return found + 1 if found >= 0 else at


def far(rng, low, high):
    """A distance between low and high, uniform in its logarithm."""
    return int(math.exp(rng.uniform(math.log(low), math.log(high))))


def with_facts(rng, text, length, count):
    """Inserts facts and their second occurrences into text; returns bytes and loss weights."""
    inserts = []
    for _ in range(count):
        name, value = make_fact(rng)
        line = f"{LEAD}{name}{MIDDLE}".encode()
        distance = far(rng, 40, length - 120)
        first = rng.randrange(0, length - distance - 80)
        for at, weight in ((first, 0.0), (first + distance, 4.0)):
            weights = [0.1] * len(line) + [weight] * 5 + [0.5, 0.5]
            inserts.append((snap(text, at), line + value.encode() + b".\n", weights))
    inserts.sort(key=lambda insert: insert[0])
    out, weights, done = [], [], 0
    for at, piece, loss in inserts:
        at = max(at, done)
        out += (text[done:at], piece)
        weights += [1.0] * (at - done) + loss
        done = at
    out.append(text[done:])
    weights += [1.0] * (len(text) - done)
    return b"".join(out)[:length], weights[:length]


def with_repeats(rng, text, length, count):
    """Repeats passages of text later in the sequence; returns bytes and loss weights."""
    weights = [1.0] * len(text)
    for _ in range(count):
        size = far(rng, 60, min(600, length // 4))
        distance = far(rng, size + 20, length - size - 20)
        first = snap(text, rng.randrange(0, length - distance - size))
        passage = text[first : first + size]
        at = snap(text, first + distance)
        text = text[:at] + b"\n\n" + passage + text[at:]
        weights[at:at] = ([0.1] * 10 + [1.5] * size)[: size + 2]
    return text[:length], weights[:length]


def fact_item(rng, text, distance, others):
    """A prompt of up to 4,080 bytes that asks for a value that stands exactly distance bytes back.

    The facts between it and the question are decoys; the text before it has a random length.
    """
    facts = {}
    while len(facts) < others + 1:
        facts.update([make_fact(rng)])
    (name, value), *decoys = facts.items()
    ask = f"{LEAD}{name}{MIDDLE}".encode()
    fact = ask + value.encode() + b".\n"
    size = distance - len(fact)
    before = rng.randrange(0, max(1, 4080 - distance - len(ask)))
    end = snap(text, rng.randrange(4096, len(text) - 40))
    body = bytearray(text[end - size : end])
    for i, (other, code) in enumerate(decoys):
        line = f"{LEAD}{other}{MIDDLE}{code}.\n".encode()
        at = i * size // others + rng.randrange(max(1, size // others - len(line)))
        body[at : at + len(line)] = line
    prompt = text[end - size - before : end - size] + fact + body[:size] + ask
    return prompt.decode(), value


def repeat_item(rng, text, distance, cue, size):
    """A passage, other text, and the first cue bytes of the passage again, distance bytes later."""
    start = snap(text, rng.randrange(len(text) - 4200))
    passage = text[start : start + cue + size]
    body = text[start : start + distance - 2] + b"\n\n"
    return (body + passage[:cue]).decode(), passage[cue:].decode()


def evaluation(text, seed, count):
    """The evaluation set over held-out text: facts with three others in between, and repeats."""
    rng = random.Random(seed)
    items = []
    for distance in DISTANCES:
        for _ in range(count):
            prompt, answer = fact_item(rng, text, distance, 3)
            items.append({"kind": "fact", "distance": distance, "prompt": prompt,
                          "answer": answer})
        for _ in range(count):
            prompt, answer = repeat_item(rng, text, distance, 40, 40)
            items.append({"kind": "repeat", "distance": distance, "prompt": prompt,
                          "answer": answer})
    return items


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", default=os.path.join(here, "heldout.txt"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=16, help="items of each kind and distance")
    args = parser.parse_args()
    with open(args.text, "rb") as f:
        for item in evaluation(f.read(), args.seed, args.count):
            print(json.dumps(item))


if __name__ == "__main__":
    main()
