"""The sentences of the stories: for every step of every plot, many ways of saying it.

Slots. {H} the hero, {he} {him} {his} {himself} the hero's pronouns; {F} the helper, {fhe} {fhim} {fhis}; {G} the friend,
{ghe} {ghim} {ghis}; {O} the object, {aO} with adjective and article, {bigO} the same without article; {D} and {aD} the other object;
{at} and {to} the place, {place} its noun, {spot} a hiding spot in it; {B} the obstacle; {solution}; {season}, {weather}, {home}.
A capital letter in a pronoun slot ({He}, {His}) makes a capital. Every sentence must be true in every plot that uses its bank.
"""

from __future__ import annotations

SETTINGS = (
    "It was a cold night, and the wind sang in the chimney.",
    "The moon was round and yellow, and the whole valley was asleep.",
    "It was a bright {season} day.",
    "The rain had stopped, and every leaf wore a drop like a tiny lamp.",
    "It was early, and a thin mist lay over the fields.",
    "The sky was full of stars.",
    "A warm wind blew from the sea.",
    "Somewhere a bell rang six times.",
    "{season_cap} came early that year.",
    "It was the quietest hour of the day.",
    "The sun went down behind the hills, as red as an apple.",
    "The village was small: one street, one well and eleven chickens.",
    "Something strange was about to happen.",
    "This is a true story, or nearly.",
    "There is a story that old people tell when the fire burns low.",
    "Nothing ever happened in the village, until one day something did.",
)
SETTING_OPENINGS = (
    "That was when {intro} woke up {home}.",
    "{home_cap}, {intro} was still awake.",
    "{home_cap}, {intro} opened one eye, and then the other.",
    "{intro_cap} sat {home} and listened.",
    "That is where our story begins, with {intro} who lived {home}.",
    "And in the middle of it all lived {intro}.",
    "{intro_cap}, who lived {home}, took a deep breath and smiled.",
)
OPENINGS = (
    "Once upon a time, there was {intro} who lived {home}.",
    "Once upon a time, {home}, there lived {intro}.",
    "Once upon a time there lived {intro}.",
    "Once upon a time, {intro} lived {home}.",
    "Once upon a time, {weather}, {intro} woke up early {home}.",
    "Once there was {intro} who lived {home}.",
    "There was once {intro}, who lived {home}.",
    "Long ago, {home}, there lived {intro}.",
    "A long time ago, there was {intro}.",
    "Far away, beyond seven hills, there lived {intro}.",
    "In a land of green valleys, there lived {intro}.",
    "In a small village by the sea, there lived {intro}.",
    "At the edge of the world, where the maps end, lived {intro}.",
    "Not so long ago, {intro} lived {home}.",
    "One {season} morning, {weather}, {intro} set out early.",
    "One day, {weather}, {intro} looked out of the window and sighed.",
    "One {season} evening, {intro} could not sleep.",
    "It was {season}, and {intro} was awake before everybody else.",
    "Every morning, {intro} opened the door and said hello to the sun.",
    "Deep in the woods, there lived {intro}.",
    "This is the story of {intro} who lived {home}.",
    "Nobody in the valley knew it yet, but {intro} was about to have an adventure.",
    "Have you ever heard of {intro} who lived {home}?",
    "My grandmother used to tell me about {intro} who lived {home}.",
    "Where the road ends and the grass begins, there lived {intro}.",
    "On a windy hill far from the city, there lived {intro}.",
    "The story begins {home}, where {intro} lived.",
    "It was raining, and {intro} sat by the window {home}.",
    "There once lived {intro}, and this is what happened to {him}.",
    "Somewhere between the mountains and the sea, there lived {intro}.",
    "In a faraway kingdom, there lived {intro}.",
    "In the days when animals could talk, there lived {intro}.",
    "On the first day of {season}, {intro} made a plan.",
    "At the end of the longest street in town lived {intro}.",
    "Last {season}, {weather}, something happened to {intro}.",
    "The sun was just coming up when {intro} opened the door.",
    "The snow, the rain and the sun all knew {intro} who lived {home}.",
    "If you follow the road past the mill, you may meet {intro}.",
)
NAMED_OPENINGS = (
    "{name} was {bare_intro} who lived {home}.",
    "{name} the {kind} lived {home}.",
    "Everyone knew {name}, the {trait} {kind} who lived {home}.",
    "{name} the {kind} woke up early. It was {season}, and the house was quiet.",
    "{name} was {bare_intro}.",
    "When {name} the {kind} was very young, {he} lived {home}.",
    "{name} the {kind} opened one eye, and then the other. It was {season}.",
)
KIND_OPENINGS = (
    "There was a {kind} who lived {home}, and everybody called {him} simply the {kind}.",
    "The {kind} yawned, stretched and looked at the sky. It was {season}.",
    "The {kind} lived {home}.",
    "A {trait} {kind} lived {home}.",
    "The {trait} {kind} lived all alone {home}.",
    "One day, the {kind} looked up at the sky and smiled.",
    "In the middle of {season}, the {kind} woke up early.",
)

TRAIT_LINES = ("{trait_line}",)
TRAVEL = (
    "So {H} packed some bread and set off {to}.",
    "Early the next morning, {H} walked {to}.",
    "Without waiting another minute, {H} hurried {to}.",
    "\"There is no time to lose,\" said {H}, and {he} set off {to}.",
    "{H} put a plum in {his} pocket and went {to}.",
    "The way {to} was long, but {H} hummed a little song and went on.",
    "Step by step, {H} made {his} way {to}.",
    "So off {H} went, {to}, with a brave face and a wobbly heart.",
    "{H} took a deep breath, closed the door and went {to}.",
)
SENSES = ("{sense}.", "{sense}, and {H} stopped for a moment to rest.", "{sense}. {H} looked around with wide eyes.", "There {he} stood at last. {sense}.")
OBSTACLE = (
    "But soon {B}.",
    "Then {he} had to stop, because {B}.",
    "Suddenly, {B}.",
    "But {he} had not gone far when {B}.",
    "Just then, there was trouble: {B}.",
    "Everything went well until {B}.",
)
DESPAIR = (
    "{H} sat down and sighed. \"I cannot do this alone,\" {he} said.",
    "{H} tried once. {H} tried twice. It was no use.",
    "\"Oh dear,\" said {H}. \"What now?\"",
    "{H} tried with all {his} might, but it was too hard.",
    "\"I will never get past this,\" whispered {H}.",
    "{H} kicked a pebble. The pebble did not help either.",
    "For a while, {H} did not know what to do.",
)
HELPER = (
    "Just then, {aF} came by. \"Why so sad?\" asked {F}.",
    "At that moment, {aF} came along the path. \"You look as if you need a hand,\" said {F}.",
    "\"Can I help you?\" said a voice. It was {aF}.",
    "{aF} had been watching quietly. \"Let me try,\" said {F}.",
    "Then {H} heard a cough behind {him}. There stood {aF}. \"I know what to do,\" said {F}.",
    "Along came {aF}, whistling a tune. \"What is the matter?\" asked {F}.",
    "\"Hello down there,\" said a friendly voice, and {aF} appeared.",
    "A moment later {H} met {aF}. \"Nobody should be stuck on such a fine day,\" said {F}.",
)
ASK = (
    "{H} told {F} everything, from the beginning to the end.",
    "\"I must find a way through,\" said {H}. \"Then we will find it together,\" said {F}.",
    "\"Please help me,\" said {H}. \"With pleasure,\" said {F}.",
    "\"Would you really help a stranger?\" asked {H}. \"There are no strangers here,\" said {F}, \"only friends who have not had tea yet.\"",
    "{H} explained the trouble, and {F} nodded slowly.",
    "\"What can you do?\" asked {H}. \"Watch me,\" said {F}.",
)
SOLVE = (
    "{solution}.",
    "Then {solution}.",
    "At once, {solution}.",
    "Without another word, {solution}.",
    "And this is what happened: {solution}.",
)
THANKS = (
    "\"Thank you,\" said {H}. \"I will never forget this.\"",
    "\"How can I thank you?\" asked {H}. \"Tell me how it ends,\" said {F}.",
    "{H} thanked {F} and shared {his} bread with {fhim}.",
    "\"You are the best {helper} in the world,\" said {H}. {F} blushed.",
    "They shook hands, and {H} went on alone.",
    "\"Good luck,\" said {F}, and waved until {H} was out of sight.",
    "{H} bowed very low, and {F} bowed even lower.",
)
DECOY_SEEN = (
    "On the way, {he} saw {aD}, but it was not {hers}, so {he} left it where it was.",
    "{aD} lay beside the path. It was pretty, but it was not what {he} was looking for.",
    "Something gleamed on the ground, but it was only {aD}. {H} walked on.",
    "A trader offered {him} {aD}. \"No, thank you,\" said {H}. \"I need something else.\"",
    "Beside the path lay {aD}, but {H} did not stop.",
)

# Plot 1: the hero loses the object and looks for it.
LOST_OWN = (
    "{H} had {aO}, and {he} loved it more than anything. {treasured}.",
    "{His} greatest treasure was {aO}. {treasured}.",
    "Wherever {H} went, {he} took {his} {bigO} along. {treasured}.",
    "{H} owned very little, but {he} had {aO}. {treasured}.",
    "On {his} birthday, {H} had been given {aO}. {treasured}.",
)
LOST_LOSE = (
    "But one day, the {O} was gone.",
    "One morning, {H} reached for the {O}, and it was not there.",
    "Then, one windy day, the {O} disappeared.",
    "But on the way home one evening, {H} lost the {O}.",
    "One day {H} came home, and the {O} was missing.",
)
LOST_SEARCH = (
    "{H} looked under the bed, behind the door and even in the soup pot. Nothing.",
    "{He} searched every corner of the house, and then every corner again.",
    "{H} asked everyone, but nobody had seen the {O}.",
    "{H} turned every pocket inside out, but there were only crumbs.",
)
LOST_RECALL = (
    "Then {he} remembered: yesterday, {he} had been {at}.",
    "\"I had it yesterday, {at},\" {he} thought.",
    "\"When did I last see it?\" {he} wondered. \"It was {at}!\"",
    "\"Perhaps I dropped it {at},\" said {H}.",
)
LOST_HAPPY = (
    "And there, {spot}, lay the {O}! {H} laughed out loud and held it tight.",
    "{H} looked {spot}, and there it was: the {O}, a little dusty but safe.",
    "Something peeped out {spot}. It was the {O}! {H} danced three times around it.",
    "\"There you are!\" cried {H}. {spot_cap} lay the {O}, as if it had been waiting.",
    "At last, {spot}, {H} found the {O}. {He} was so happy that {he} could not speak.",
)
LOST_SAD = (
    "{H} looked {spot}, but there was only {aD}. The {O} was gone for good.",
    "All day long {he} searched, but {he} found only {aD} {spot}. Nobody ever saw the {O} again.",
    "{spot_cap} lay {aD}, but there was no {O}. {H} never found it again.",
    "{He} searched until the stars came out. {He} found {aD} {spot}, but the {O} was lost forever.",
)

# Plot 2: a friend needs the object, and the hero goes to find one.
QUEST_NEED = (
    "One day, {his} friend {G}, {gintro}, fell ill. \"If only I had {aO},\" {ghe} whispered, \"I am sure that I would feel better.\"",
    "{H} had a dear friend, {gintro} named {G}. \"More than anything, I wish for {aO},\" {G} said one evening.",
    "Soon it would be the birthday of {G}, {gintro} and {Hs} best friend. {G} had always dreamed of {aO}.",
    "{His} neighbor {G}, {gintro}, was sad. \"I once had {aO},\" said {G}, \"but it fell into the sea.\"",
    "One night a storm took everything from {G}, {gintro} who lived next door. Even the {bigO} that {ghe} loved was gone.",
)
QUEST_VOW = (
    "\"Then I will find one for you,\" promised {H}.",
    "\"I will bring {G} {aO},\" said {H}, \"even if it takes all week.\"",
    "{H} thought about it all night. In the morning, {he} knew what to do.",
    "\"Do not cry,\" said {H}. \"I will find a {O} for you.\"",
    "A promise is a promise, and {H} made one: {he} would find a {O} for {G}.",
)
QUEST_HINT = (
    "People said that there was one {at}.",
    "An old song told of {aO} hidden {at}.",
    "The postman had once seen {aO} {at}.",
    "\"Look {at},\" said the wind, or perhaps it was only a neighbor.",
)
QUEST_HAPPY = (
    "And {spot}, {H} found what {he} was looking for: {aO}. {He} ran all the way home. When {G} saw the {O}, {ghe} laughed for the first time in weeks.",
    "There, {spot}, lay {aO}. {H} carried it home as carefully as an egg. \"For me?\" said {G}, and {ghis} eyes shone.",
    "{H} searched until evening, and there it was, {spot}: the {O}! {G} hugged {him} so hard that {he} squeaked.",
    "{H} reached out {spot}, and {his} fingers touched the {O}. That same night {he} gave it to {G}, who could not stop smiling.",
)
QUEST_SAD = (
    "But {spot}, there was only {aD}. {H} took it home, but it was not what {G} had wished for. {G} tried to smile, and then {ghe} cried.",
    "{H} searched for three days. {He} found {aD}, but no {O}. When {he} came home, {G} had already moved away.",
    "{spot_cap}, {H} found {aD}, and nothing else. \"It does not matter,\" said {G} softly, but it did.",
    "There was no {O}. There was only {aD}, {spot}. {H} brought it to {G}, but {ghis} bed was empty, and {ghis} house was dark.",
)

# Plot 3: a friend is missing, and the hero goes to find the friend.
RESCUE_MISSING = (
    "{H} had a best friend, {gintro} named {G}. One evening, {G} did not come home.",
    "Every day {H} played with {G}, {gintro} from next door. But one day, {G} was nowhere to be seen.",
    "One foggy morning, somebody knocked at the door. \"{G} is missing!\" they cried. {G} was {gintro} and {Hs} dearest friend.",
    "{His} best friend was {G}, {gintro}. When the sun went down that day, {Gs} chair was empty.",
)
RESCUE_CLUE = (
    "There were footprints in the mud, and they led {to}.",
    "\"I saw {G} go {to},\" said the old postman.",
    "On the table lay a note. It said, \"Gone {to}. Back for supper.\" But supper was cold.",
    "Somebody had heard a small voice calling {at}.",
)
RESCUE_TAKE = (
    "{H} looked at the {D} and at the {O}. {He} took the {O} and left the {D} at home.",
    "\"The {O} may help me,\" said {H}, and {he} took it along. The {D} stayed on the shelf.",
    "{H} thought about taking the {D}, but in the end {he} took the {O} instead.",
    "There was room for only one thing in the bag. {H} left the {D} behind and took {his} {bigO}.",
)
RESCUE_HAPPY = (
    "And there, {spot}, sat {G}, cold and tired. \"I knew that you would come,\" said {G}. They walked home together, singing.",
    "{H} called and called, and at last a small voice answered. {G} was sitting {spot}. They hugged for a long time.",
    "{spot_cap}, {H} found {G}, who had hurt {ghis} foot. {H} carried {ghim} all the way home, and there was hot soup for two.",
    "\"{G}!\" called {H}. \"Here!\" cried {G} from a place {spot}. Nobody had ever been so glad.",
)
RESCUE_SAD = (
    "But {spot} there was only a letter. \"Dear friend,\" it said, \"I have gone to live across the sea. Do not forget me. {G}.\" {H} read it twice and wept.",
    "{H} called until {his} voice was gone, but no answer came. {G} was never seen in the valley again.",
    "{H} saw a ship far out on the water, and {G} stood on it, waving. It was too late to say goodbye.",
    "{H} searched the whole night. In the morning {he} walked home alone, and {Gs} chair stayed empty.",
)

# Plot 4: the hero borrows the object and breaks or loses it.
BORROW_LEND = (
    "{His} friend {G}, {gintro}, had {aO} and {aD}. \"May I borrow the {O}?\" asked {H}. \"Yes,\" said {G}, \"but take good care of it.\"",
    "{H} had a friend named {G}, {gintro}. One day {G} lent {him} {ghis} {bigO}. {Ghe} kept only {ghis} {D} for {ghimself}.",
    "One day {H} borrowed {aO} from {G}, {gintro} next door. \"You may have the {O},\" said {G}, \"but not the {D}.\"",
)
BORROW_BREAK = (
    "{H} took the {O} {to} to show it to the birds. But {he} tripped over a root, and the {O} broke.",
    "{H} played with the {O} {at} all afternoon. Then it slipped from {his} hands and cracked in two.",
    "But when {H} was {at}, a gust of wind tore the {O} away and dashed it against a rock.",
    "{H} was running {at} with the {O} when {he} fell. There was an ugly sound. The {O} was broken.",
)
BORROW_HIDE = (
    "{H} was so ashamed that {he} hid the pieces {spot}.",
    "\"{G} will never forgive me,\" thought {H}, and {he} hid the broken {O} {spot}.",
    "{H} hid the pieces {spot} and walked home without a word.",
)
BORROW_GUILT = (
    "That night {he} could not sleep. Even the moon seemed to look at {him}.",
    "At supper, the soup tasted of nothing at all.",
    "All night long, something in {his} chest felt as heavy as a stone.",
    "The clock went tick, tock, and to {H} it sounded like tell, tell.",
)
BORROW_ADVICE = (
    "In the morning {he} met {aF}. \"You look troubled,\" said {F}. \"A broken thing is small,\" said {F}, when {H} had told everything. \"A lie grows.\"",
    "Then {aF} came by. {H} told {fhim} the whole story. \"The truth is like cold water,\" said {F}. \"It is only bad at the first step.\"",
    "{aF} found {him} sitting on a wall. \"I have broken what was not mine,\" said {H}. \"Then say so,\" said {F}. \"It is the shortest way home.\"",
)
BORROW_CONFESS = (
    "So {H} fetched the pieces, went to {G} and told {ghim} everything.",
    "{H} knocked at {Gs} door with a beating heart. \"I broke the {O},\" {he} said. \"I am so sorry.\"",
    "{H} gathered the pieces and brought them to {G}. \"It was my fault,\" {he} said.",
)
BORROW_HAPPY = (
    "{G} was silent for a moment. Then {ghe} smiled. \"Thank you for telling me,\" {ghe} said. \"Shall we mend it together?\" And they did.",
    "\"I was angry about the {O},\" said {G}, \"but I would rather have a friend.\" Together they glued it until it was almost as good as new.",
    "{G} looked at the pieces and began to laugh. \"I broke it myself last year,\" {ghe} said. \"We only need more glue!\"",
)
BORROW_SAD = (
    "{G} did not say a word. {Ghe} took the pieces and closed the door. After that, {ghe} never came to play again.",
    "\"You should have told me at once,\" said {G}, and there were tears in {ghis} eyes. They were never friends again.",
    "But {G} had already found the pieces. \"You hid it from me,\" {ghe} said, and turned away for good.",
)

# Plot 5: a contest with a prize.
CONTESTS = {
    "race": ("The road was dusty and hot", "ran faster than the wind", "crossed the line"),
    "boat race": ("The little boats rocked on the start", "steered with all {his} skill", "reached the far shore"),
    "singing contest": ("Everybody was very nervous", "sang with a full heart", "held the last note"),
    "baking contest": ("The air was full of sugar", "stirred and kneaded and hoped", "opened the oven"),
    "riddle contest": ("The judge had a very long beard", "thought harder than ever before", "gave the last answer"),
    "dancing contest": ("The fiddles were already playing", "danced until the floor shook", "made the last turn"),
}
CONTEST_NEWS = (
    "One day, there was to be a great {contest} {at}. The first prize was {aO}, and the last one got {aD}.",
    "A poster hung on every tree: \"Big {contest} {at}! First prize: {aO}. For the last: {aD}.\"",
    "The whole valley was talking about the {contest} {at}. The winner would get {aO}, and the loser {aD}.",
)
CONTEST_RIVAL = (
    "\"I will win,\" said {G}, {gintro} with a very loud voice.",
    "{G}, {gintro}, had won every year. \"Nobody beats me,\" said {G}.",
    "\"You?\" laughed {G}, {gintro}. \"You will never win.\"",
)
CONTEST_WISH = (
    "{H} wanted the {O} with all {his} heart.",
    "{H} dreamed of the {O} every night.",
    "\"I will do my best,\" said {H}, \"and my best is not small.\"",
)
CONTEST_DAY = (
    "The great day came. {contest_scene}. {H} {contest_try}.",
    "On the day of the {contest}, {contest_scene_low}. {H} {contest_try}.",
)
CONTEST_HAPPY = (
    "When {H} {contest_end}, everybody cheered. {He} had won the {O}! Even {G} clapped in the end.",
    "And when {H} {contest_end}, {he} was the first of all. \"The {O} is yours,\" said the judge. {G} shook {his} hand.",
    "At the end, {H} {contest_end} before anyone else, and the {O} was {hers}. \"Teach me how you did it,\" said {G}.",
)
CONTEST_SAD = (
    "But {G} was better. When {H} {contest_end}, the {O} was already gone, and {he} got only the {D}. {H} cried all the way home.",
    "But {H} came last. {G} took the {O} without a glance, and {H} went home with the {D} and a heavy heart.",
    "It was not enough. {G} won the {O}. For {H}, there was only the {D}, and a long, quiet walk home in the rain.",
)

# Plot 6: a magic object that grants one wish.
WISH_SETUP = (
    "{H} had always wanted to see what was {at}.",
    "One day, {H} grew tired of doing the same things every day.",
    "One night, {H} dreamed of a light shining {at}.",
    "People said that strange things happened {at}, and {H} wanted to see them.",
    "\"Today I will go farther than ever before,\" said {H}.",
)
WISH_FIND = (
    "At last, {spot}, {H} found {aO}. It was glowing softly. Next to it lay {aD}, which was quite ordinary.",
    "Soon {H} saw something shine {spot}. It was {aO}. There was {aD} too, but it did not shine at all.",
    "{spot_cap}, {H} found two things: {aO} and {aD}. The {D} was an ordinary {D}. The {O} hummed.",
    "And what did {H} find {spot}? There was {aD}, quite ordinary, and beside it {aO} that glowed like a firefly.",
)
WISH_MAGIC = (
    "\"I am a magic {O},\" said the {O}. \"You have one wish. Think well.\"",
    "\"Hello,\" said the {O}. \"One wish, please. I have not got all day.\"",
    "When {H} touched the {O}, a voice said, \"One wish is yours, and only one.\"",
)
WISH_FRIEND = (
    "{H} thought of gold. {H} thought of a mountain of cake. Then {he} thought of {G}, {gintro} who {gtrouble}.",
    "At first {H} wanted to wish for a castle. But then {he} remembered {his} friend {G}, {gintro} who {gtrouble}.",
)
TITLES = {
    "lost": ("The lost {O}", "{name} and the lost {O}", "The {kind} who lost a {O}"),
    "quest": ("{aO_cap} for {G}", "The promise", "{name} keeps a promise", "The search for the {O}"),
    "rescue": ("Where is {G}?", "The search for {G}", "{name} finds the way"),
    "borrow": ("The broken {O}", "{name} tells the truth", "The borrowed {O}"),
    "contest": ("The great {contest}", "The {contest}", "{name} and the great {contest}"),
    "wish": ("The magic {O}", "One wish", "{name} and the magic {O}", "The {kind} and the magic {O}"),
    "fear": ("The {kind} who was afraid", "{name} is afraid", "The brave {kind}", "A small brave heart"),
    "visitor": ("The stranger at the door", "A knock at the door", "{name} and the stranger", "The stranger in the rain"),
}
THEMES = {
    "lost": ("a lost {O}", "something that is lost", "looking for a {O}"),
    "quest": ("a promise", "a present for a friend", "a friend who needs a {O}"),
    "rescue": ("a missing friend", "friendship", "a friend who is lost"),
    "borrow": ("telling the truth", "a broken {O}", "a mistake"),
    "contest": ("a {contest}", "a contest", "winning and losing"),
    "wish": ("a magic {O}", "a wish", "magic"),
    "fear": ("being brave", "courage", "somebody who is afraid of {fear}"),
    "visitor": ("a stranger", "sharing", "a knock at the door"),
}
GTROUBLE = ("had been ill for a long time", "had lost {ghis} home in the storm", "had not smiled since the winter", "could not walk any more")
WISH_HAPPY = (
    "\"I wish that {G} may be well and happy,\" said {H}. The {O} grew warm, and far away, {G} began to laugh.",
    "\"My wish is for {G},\" said {H}. \"Good choice,\" said the {O}. When {H} came home, {G} was dancing at the door.",
)
WISH_SAD = (
    "But the gold was so tempting. \"I wish for a heap of gold,\" said {H}. The gold came, cold and yellow, but {G} went away, and {H} sat on it all alone.",
    "But {H} could not resist. \"I wish to be the richest of all,\" {he} said. And so {he} was, but {G} never spoke to {him} again, and {he} was lonely.",
)

# Plot 7: the hero is afraid, and must be brave for a friend.
FEARS = ("the dark", "thunder", "high places", "deep water", "strangers", "loud noises", "shadows")
FEAR_OF = (
    "There was only one trouble: {H} was afraid of {fear}.",
    "{H} had a secret. {He} was terribly afraid of {fear}.",
    "More than anything else, {H} feared {fear}.",
    "Nobody knew it, but {fear} made {him} tremble from head to toe.",
)
FEAR_GIFT = (
    "\"Take this {bigO},\" said {his} grandmother. \"It is full of courage.\" The {D} on the shelf was only for looking at.",
    "On {his} birthday, {his} grandfather gave {him} {aO}. \"Hold it tight when you are afraid,\" he said. Then he put the {D} back into the drawer.",
    "{His} aunt had two treasures, {aO} and {aD}. \"The {O} is for you,\" she said. \"It makes small hearts big.\"",
)
FEAR_CALL = (
    "Then one night somebody cried for help. It was {his} friend {G}, {gintro}, who was stuck {at}.",
    "One evening, the news came running: {G}, {gintro}, had fallen and lay {at}, all alone. {G} was {Hs} best friend.",
    "One stormy night, {his} friend {G}, {gintro}, was caught {at} and could not get home.",
)
FEAR_GO = (
    "{His} knees shook, but {H} held the {O} tight.",
    "\"I am afraid,\" said {H}, \"but I am going anyway.\"",
    "{H} squeezed the {O} and counted to three. On four, {he} went.",
    "\"Being brave,\" {H} told {himself}, \"is being afraid and going all the same.\"",
)
FEAR_HAPPY = (
    "And there was {G}, {spot}. \"You came!\" said {G}. Only on the way home did {H} notice that {he} had quite forgotten to be afraid.",
    "{H} found {G} {spot} and took {ghim} by the hand. \"Were you not afraid?\" asked {G}. \"Very,\" said {H}, and they both laughed.",
    "{spot_cap} sat {G}, wet and cold. {H} brought {ghim} home safely, and from that day {fear} seemed much smaller.",
)
FEAR_SAD = (
    "But then {his} fear grew as big as a house, and {H} turned back. When others brought {G} home at dawn, {ghe} would not look at {him}.",
    "But {H} thought of {fear} and could not take one more step. {G} waited in vain, and they were never friends again.",
    "But fear was stronger. {H} ran home and hid under the bed. In the morning, {G} had left the valley without a word.",
)

# Plot 8: a stranger knocks at the door.
VISITOR_KNOCK = (
    "One stormy night there was a knock at the door. Outside stood {G}, {gintro}, wet to the skin. \"I lost my way {at},\" said {G}. \"May I come in?\"",
    "It was the coldest night of the year when somebody knocked. It was {G}, {gintro}. \"I have come all the way from the {place},\" said {G}, \"and I am so hungry.\"",
    "Late one night, {H} heard a soft knock. {gintro_cap} stood in the rain. \"My name is {G},\" said the stranger. \"I was robbed {at}, and I have nothing left.\"",
)
VISITOR_BAG = (
    "In {ghis} bag, {G} had only {aO} and {aD}.",
    "{G} carried {aO} under one arm and {aD} under the other.",
    "All that {ghe} owned was {aO} and {aD}.",
)
VISITOR_DOUBT = (
    "{H} had only one bowl of soup, and {he} did not know what to do.",
    "{H} thought of the last piece of bread in the cupboard and said nothing.",
    "\"I do not like strangers,\" thought {H}, and {his} hand stayed on the latch.",
)
VISITOR_ADVICE = (
    "{aF}, who lived upstairs, looked down. \"A shared soup is twice as warm,\" said {F}.",
    "Next to the stove sat {aF}. \"We were all strangers once,\" said {F}.",
    "\"Think of how you would feel out there,\" whispered {aF} from the next window. It was true, what {F} said.",
)
VISITOR_HAPPY = (
    "So {H} opened the door wide. They ate and talked until morning. \"Keep the {O},\" said {G} at sunrise. \"It is yours now. I will keep the {D}, to remember you by.\"",
    "\"Come in, come in!\" said {H}, and gave {G} the bigger half of everything. In the morning {G} was gone, but on the table lay the {O}, shining like new.",
    "{H} made room by the fire, and {G} told wonderful stories all night. When {ghe} left, {ghe} took the {D} and gave the {O} to {H}.",
)
VISITOR_SAD = (
    "But {H} shut the door. In the morning, there was only the {D} in the snow, and footprints that led away. {H} was sorry then, but it was too late.",
    "\"Go away,\" said {H}, and closed the door. Later {he} ran out to call {G} back, but {he} found only the {D} in the mud. {G} was gone.",
    "{H} did not open the door. At dawn {he} found the {D} on the step, cold and wet. Nobody ever learned what became of {G}.",
)

HAPPY_IMAGE = ("{image}.", "{image}, and {H} fell asleep with a smile.", "{image}. It was the best day of the year.")
HAPPY_END = (
    "And they all lived happily ever after.",
    "From that day on, {H} and {F} were the best of friends.",
    "And if you listen closely, you can still hear {H} laughing.",
    "{H} had never been so happy.",
    "It was a good day, and it was followed by many more.",
    "And that evening there was cake for everyone, even for {F}.",
    "So it all ended well, and the stars came out to see it.",
)
SAD_END = (
    "{H} never forgot it, and on rainy days {he} still felt sad.",
    "That night {H} cried {himself} to sleep, and the rain cried too.",
    "From then on, the house was very quiet.",
    "{H} sat by the window for a long time and did not say a word.",
    "And although {F} came to sit beside {him}, nothing could make {him} smile.",
    "The days went by, but the sadness stayed.",
    "{H} wished that the story had ended another way, but it had not.",
)
MORALS = {
    "lost": {"happy": "Those who keep looking find more than they lost.", "sad": "Some things are lost forever, so hold them well."},
    "quest": {"happy": "A promise kept is the finest gift.", "sad": "Even a kind heart sometimes comes too late."},
    "rescue": {"happy": "A true friend comes to look for you.", "sad": "Say goodbye while there is still time."},
    "borrow": {"happy": "The truth mends more than glue.", "sad": "A hidden mistake can break a friendship."},
    "contest": {"happy": "Do your best, and be kind to those who lose.", "sad": "Not every brave heart wins the prize."},
    "fear": {"happy": "Courage is being afraid and going all the same.", "sad": "Fear is a bad master."},
    "visitor": {"happy": "What you share comes back to you.", "sad": "A closed door keeps out more than the cold."},
    "wish": {"happy": "The best wish is a wish for a friend.", "sad": "Gold is a cold friend."},
}
