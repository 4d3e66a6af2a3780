"""The words of the story world: who lives in it, where, with what, and what can go wrong there.

Tables here are tied together so that a plot stays sensible: a place has its own hiding spots and obstacles, an obstacle
has the abilities that overcome it, an animal has an ability and a home, an object has a reason to be loved and an image to end on.
Everything that can be the answer to a question (names, kinds, objects, places) is one word.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A sort of character: what it can do for others, and where it lives."""

    noun: str
    ability: str
    homes: tuple[str, ...]
    is_animal: bool


@dataclass(frozen=True)
class Thing:
    """An object: adjectives that suit it, why somebody loves it, and a last image of it."""

    noun: str
    adjectives: tuple[str, ...]
    treasured: str
    image: str


@dataclass(frozen=True)
class Place:
    """Somewhere to go: how to say 'there' and 'to there', what it is like, where things hide, what blocks the way."""

    noun: str
    at: str
    to: str
    senses: tuple[str, ...]
    spots: tuple[str, ...]
    obstacles: tuple[str, ...]


GIRL_NAMES = (
    "Mira Lily Anna Rosa Ella Nora Ivy Hazel Ruby Clara Maya Tilly Lena Zara Poppy Daisy Wren Luna Stella Elsie Greta Ada "
    "Iris Freya Olive Tessa Marta Nina Cora Edith Pearl Juno Mina Sofia Alma Flora Hanna Kira Lotta Mabel Nell Opal Petra "
    "Rhea Sana Thea Uma Vera Willa Yara Zoe Amina Bella Celia Dora Eva Faye Gwen Holly Ingrid Jade Leila Molly Priya Sara"
).split()
BOY_NAMES = (
    "Tom Sam Leo Max Ben Finn Oscar Theo Hugo Jack Noah Milo Felix Otto Emil Arlo Jonah Luca Omar Ravi Kofi Nils Anton "
    "Bruno Caleb Dario Elias Frank George Henry Ivan Jasper Karl Liam Marco Ned Oliver Peter Quinn Rufus Simon Toby Victor "
    "Walter Yusuf Adam Basil Colin David Erik Gus Harry Isaac Joel Kai Lars Martin Nico Owen Paul Robin Stefan Tariq Wade"
).split()
ANIMAL_NAMES = (
    "Pip Bramble Clover Pepper Biscuit Maple Nutmeg Acorn Button Thistle Hopper Ginger Tumble Whisker Pebble Rusty Willow "
    "Fern Dusty Twig Barley Cricket Sunny Patch Mossy Misty Nibble Puddle Smoky Berry Bean Sooty Snowy Scout Honey Rowan "
    "Sorrel Tansy Juniper Flicker Waddle Bumble Fidget Poppet Pumpkin Cinder Ember Copper Domino Marble Velvet Ziggy"
).split()

KINDS = {
    kind.noun: kind
    for kind in (
        Kind("fox", "clever", ("in a den under an old oak", "at the edge of the woods", "in a warm den behind the hill"), True),
        Kind("mouse", "small", ("in a cracked teapot behind the mill", "under the floor of the bakery", "in a hole beneath the stairs"), True),
        Kind("owl", "wings", ("in a hollow elm", "high in the church tower", "in the rafters of an old barn"), True),
        Kind("rabbit", "dig", ("in a burrow under the hill", "in a cozy burrow below the meadow", "beside a field of clover"), True),
        Kind("bear", "strong", ("in a deep, warm cave", "in a cave above the valley", "beside a waterfall"), True),
        Kind("hedgehog", "small", ("under a pile of golden leaves", "beneath a blackberry hedge", "behind the garden shed"), True),
        Kind("squirrel", "climb", ("at the top of a tall pine", "in a hollow chestnut tree", "high in a walnut tree"), True),
        Kind("otter", "swim", ("on the bank of a bright river", "beside a quiet stream", "in a snug den by the water"), True),
        Kind("badger", "dig", ("in a tidy house under the roots", "deep under the hill", "in a long, neat tunnel"), True),
        Kind("frog", "swim", ("on a lily pad", "beside a green pond", "among the reeds"), True),
        Kind("turtle", "swim", ("beside a sleepy pond", "on a sandy shore", "near the slow green river"), True),
        Kind("cat", "climb", ("in a house with blue shutters", "above the fish shop", "in a sunny window on Baker Street"), True),
        Kind("dog", "dig", ("on a farm at the end of the road", "in a red barn", "in a house beside the station"), True),
        Kind("crow", "wings", ("on the roof of the town hall", "in a windy old tree", "at the top of a crooked chimney"), True),
        Kind("sparrow", "wings", ("under the roof of the school", "in a hedge full of berries", "in a tiny nest above the door"), True),
        Kind("goat", "climb", ("on a steep green hill", "high in the mountains", "on a farm with a broken fence"), True),
        Kind("beaver", "swim", ("in a fine house of sticks", "beside a dam on the river", "where the two streams meet"), True),
        Kind("mole", "dig", ("under the vegetable garden", "in a dark and comfortable tunnel", "under the soft meadow"), True),
        Kind("duck", "swim", ("on a round pond", "among the reeds by the lake", "behind the old mill"), True),
        Kind("donkey", "strong", ("on a dusty farm", "in a stable behind the inn", "in a field of thistles"), True),
        Kind("horse", "strong", ("in a stable that smelled of hay", "on a farm near the sea", "in a wide green field"), True),
        Kind("goose", "wings", ("beside the village pond", "on a farm by the road", "near the old stone bridge"), True),
        Kind("lion", "strong", ("on a golden plain", "under a wide shady tree", "among the warm rocks"), True),
        Kind("monkey", "climb", ("in a tall fig tree", "in the greenest part of the jungle", "above the market roofs"), True),
        Kind("elephant", "strong", ("near a wide brown river", "on a grassy plain", "at the edge of the jungle"), True),
        Kind("wolf", "strong", ("on the far side of the mountain", "at the dark edge of the forest", "in a rocky den"), True),
        Kind("penguin", "swim", ("on a small white island", "at the edge of the ice", "on a cold and windy shore"), True),
        Kind("dragon", "light", ("in a cave full of echoes", "on top of a smoky mountain", "in the tower of a ruined castle"), True),
        Kind("robot", "strong", ("in a workshop full of springs", "in a shed behind the clock tower", "at the end of a quiet street"), False),
        Kind("girl", "clever", ("in a small white house", "in a village by the sea", "at the end of a long lane"), False),
        Kind("boy", "clever", ("in a house on the hill", "in a village by the sea", "above his uncle's shop"), False),
        Kind("princess", "clever", ("in a castle with a hundred windows", "in a palace by the lake", "in the tallest tower of the castle"), False),
        Kind("prince", "clever", ("in a castle with a hundred windows", "in a drafty old palace", "in a castle by the sea"), False),
        Kind("king", "clever", ("in a castle on a hill", "in a golden palace", "in a kingdom between two rivers"), False),
        Kind("queen", "clever", ("in a palace of white stone", "in a castle by the lake", "in a quiet northern kingdom"), False),
        Kind("knight", "strong", ("in a castle by the sea", "in a cold stone tower", "at the edge of the kingdom"), False),
        Kind("wizard", "light", ("in a crooked tower", "in a house full of books", "at the top of a hundred stairs"), False),
        Kind("witch", "light", ("in a cottage in the woods", "in a house that leaned to one side", "at the end of a misty lane"), False),
        Kind("baker", "strong", ("above a warm bakery", "behind a shop that smelled of bread", "in a narrow house in the village"), False),
        Kind("farmer", "strong", ("on a small farm", "in a valley full of corn", "in a house with a green door"), False),
        Kind("sailor", "swim", ("in a little house by the harbor", "on a boat with a patched sail", "near the lighthouse"), False),
        Kind("fisherman", "swim", ("in a hut on the beach", "in a village by the sea", "beside a cold blue lake"), False),
        Kind("tailor", "clever", ("above a shop full of buttons", "in a narrow house by the market", "on a crooked street"), False),
        Kind("teacher", "clever", ("beside the village school", "in a house full of maps", "in a small house with a big clock"), False),
        Kind("painter", "clever", ("in an attic full of colors", "in a house with a yellow door", "on the sunny side of the street"), False),
        Kind("shepherd", "climb", ("on a green hillside", "in a hut in the mountains", "in a stone house above the valley"), False),
        Kind("miller", "strong", ("in a mill by the river", "in an old windmill", "where the stream turns the wheel"), False),
        Kind("gardener", "dig", ("behind the palace garden", "in a cottage covered with roses", "in a house full of seeds"), False),
        Kind("pirate", "swim", ("on a ship with red sails", "on a small island", "in a hut made from an old ship"), False),
        Kind("clockmaker", "clever", ("in a shop that ticked all day", "under the clock tower", "in a house with forty clocks"), False),
        Kind("blacksmith", "strong", ("beside a glowing forge", "at the edge of the village", "in a house of black stone"), False),
        Kind("tiger", "strong", ("in the deep green jungle", "under a fig tree", "in a ruined temple"), True),
        Kind("pig", "dig", ("in a cozy sty", "on a farm beside the road", "behind the barn"), True),
        Kind("hen", "wings", ("in a yellow henhouse", "on a farm beside the road", "behind the kitchen"), True),
        Kind("kitten", "small", ("in a basket by the stove", "in a bookshop", "on a soft red cushion"), True),
        Kind("puppy", "dig", ("in a house full of shoes", "on a farm beside the road", "under the kitchen table"), True),
        Kind("pony", "strong", ("in a field behind the school", "in a small stable", "on a green hillside"), True),
        Kind("sheep", "strong", ("on a green hillside", "in a meadow full of daisies", "behind a low stone wall"), True),
        Kind("cow", "strong", ("in a field of buttercups", "on a farm in the valley", "in a big red barn"), True),
        Kind("bee", "small", ("in a golden hive", "in a garden full of lavender", "in a hollow tree"), True),
        Kind("snail", "small", ("under a cabbage leaf", "on a mossy wall", "in the wet grass"), True),
        Kind("seal", "swim", ("on a rocky shore", "near the lighthouse", "on a sunny sandbank"), True),
        Kind("parrot", "wings", ("in a cage with an open door", "on a ship with red sails", "in the greenest part of the jungle"), True),
        Kind("fairy", "wings", ("in a foxglove", "in a rose garden", "in a tiny house of bark"), False),
        Kind("elf", "small", ("in a house shaped like a mushroom", "under the roots of an oak", "in the northern woods"), False),
        Kind("ghost", "light", ("in an empty castle", "in the attic of an old house", "in a ruined tower"), False),
        Kind("captain", "swim", ("on a ship with white sails", "in a little house by the harbor", "near the lighthouse"), False),
        Kind("cook", "strong", ("in the kitchen of the palace", "above a small inn", "in a house that smelled of soup"), False),
        Kind("carpenter", "strong", ("in a house of new wood", "beside the saw mill", "in a workshop full of shavings"), False),
        Kind("doctor", "clever", ("in a white house on the square", "next to the school", "in a house full of bottles"), False),
        Kind("musician", "clever", ("in a room above the theater", "in a wagon painted blue", "in a house full of songs"), False),
        Kind("keeper", "light", ("in the old lighthouse", "on a rock in the sea", "in a tower above the waves"), False),
        Kind("giant", "strong", ("on top of a cloudy mountain", "in a house as tall as a church", "beyond the last hill"), False),
    )
}
HERO_ANIMALS = tuple(kind.noun for kind in KINDS.values() if kind.is_animal)
HERO_PEOPLE = tuple(kind.noun for kind in KINDS.values() if not kind.is_animal)
FEMALE_ONLY = frozenset({"girl", "princess", "queen", "witch"})
MALE_ONLY = frozenset({"boy", "prince", "king", "wizard", "fisherman"})

TRAITS = {
    "curious": ("{He} asked questions about everything, even about the moon.", "Whenever {he} saw a closed door, {he} had to look behind it.", "{He} wanted to know why the sky was blue and where the wind slept."),
    "shy": ("{He} spoke softly and hid behind doors when visitors came.", "When somebody said hello, {he} turned as red as a cherry."),
    "brave": ("Nothing frightened {him}, except perhaps cold soup.", "{He} had once told a storm to be quiet, and it had listened."),
    "kind": ("{He} always saved the last bite for somebody else.", "{He} even said good night to the spiders."),
    "clever": ("{He} could solve any riddle before breakfast.", "{He} had read every book in the house, and some of them twice."),
    "cheerful": ("{He} sang all day, mostly out of tune.", "Even on Mondays {he} whistled."),
    "stubborn": ("When {he} said no, even the wind gave up.", "{He} had never once changed {his} mind, not even about turnips."),
    "patient": ("{He} could wait a whole afternoon for one snail to cross the path.", "{He} never hurried, and {he} was never late."),
    "clumsy": ("{He} bumped into things and always said sorry to them.", "{He} could trip over a shadow."),
    "quiet": ("{He} liked to listen to the rain more than to talk.", "{He} used few words, but {he} chose them well."),
    "gentle": ("Even the butterflies were not afraid of {him}.", "{He} walked softly, so as not to wake the flowers."),
    "proud": ("{He} walked with {his} nose in the air and sometimes fell over it.", "{He} combed {himself} three times a day."),
    "lonely": ("{He} talked to the stars because nobody else was awake.", "Every evening {he} set the table for two, just in case."),
    "hungry": ("{He} thought about cake in the morning and about pie at night.", "{He} had breakfast twice, to be safe."),
    "sleepy": ("{He} could fall asleep in the middle of a word.", "{He} yawned so often that {his} friends began to yawn too."),
    "careful": ("{He} looked twice at every puddle before {he} stepped over it.", "{He} always carried an extra sock."),
    "merry": ("{He} laughed so easily that the birds laughed too.", "{He} knew a hundred jokes, and nine of them were good."),
    "dreamy": ("{He} saw castles in the clouds and ships in the soup.", "Half of the time, {his} head was in the clouds, and the other half too."),
}
SIZES = ("little", "small", "young", "old", "tiny", "tall")

THINGS = {
    thing.noun: thing
    for thing in (
        Thing("lantern", ("brass", "little", "old"), "Its light had led {his} family home on many dark nights", "That night the lantern glowed in the window until morning"),
        Thing("key", ("silver", "rusty", "tiny"), "It opened the box where {his} mother kept her letters", "The key went back on its nail by the door"),
        Thing("ring", ("golden", "plain", "thin"), "It had belonged to {his} grandmother", "The ring shone like a small piece of the sun"),
        Thing("bell", ("copper", "small", "silver"), "Its sound could call everyone home for supper", "The bell rang once, clear and bright, over the roofs"),
        Thing("drum", ("red", "little", "wooden"), "It sounded like a happy heart", "All evening the drum went tap, tap, tap"),
        Thing("kite", ("blue", "paper", "yellow"), "{His} father had made it from an old shirt", "The next day the kite danced over the hills"),
        Thing("flute", ("wooden", "silver", "thin"), "It knew the song that {his} mother used to hum", "Soft music from the flute drifted over the fields"),
        Thing("book", ("green", "dusty", "thick"), "It was full of stories about the stars", "They read the book aloud until the candle went out"),
        Thing("map", ("old", "faded", "folded"), "It showed every path that {his} grandfather had walked", "The map was hung above the fireplace"),
        Thing("scarf", ("red", "woolen", "striped"), "{His} aunt had knitted it through a whole winter", "The scarf kept two necks warm on the way home"),
        Thing("hat", ("green", "tall", "floppy"), "It made {him} feel taller than the fence", "The hat was full of cherries by the evening"),
        Thing("boot", ("brown", "muddy", "left"), "Without it, {he} could only hop", "The boot stood by the fire, steaming happily"),
        Thing("button", ("pearl", "round", "blue"), "It came from the coat of a famous captain", "The button was sewn on with three strong stitches"),
        Thing("spoon", ("silver", "wooden", "long"), "Soup tasted better with it", "Everyone had soup, and the spoon went round twice"),
        Thing("cup", ("blue", "chipped", "tin"), "{His} best friend had painted a star on it", "They drank warm milk from the cup"),
        Thing("clock", ("brass", "small", "round"), "It had ticked beside {his} bed since {he} was born", "The clock ticked softly through the night"),
        Thing("violin", ("brown", "old", "fine"), "It could make even the cook cry", "The violin sang until the moon went down"),
        Thing("compass", ("brass", "tiny", "old"), "Its needle always pointed toward home", "The needle of the compass trembled and then was still"),
        Thing("mirror", ("round", "silver", "cracked"), "It made every face look a little kinder", "The mirror caught the sunset and threw it on the wall"),
        Thing("crown", ("golden", "paper", "small"), "{He} wore it on birthdays and on rainy Mondays", "The crown was only a little bent"),
        Thing("feather", ("white", "blue", "long"), "It had fallen from the sky on the day {he} was born", "The feather lay on the pillow, light as a wish"),
        Thing("shell", ("pink", "white", "curly"), "Inside it, {he} could hear the sea", "The sea whispered in the shell all night long"),
        Thing("stone", ("smooth", "green", "round"), "It was warm in winter and cool in summer", "The stone lay on the sill, as green as a cat's eye"),
        Thing("basket", ("wicker", "round", "big"), "It could hold exactly twelve apples", "The basket was soon full of warm bread"),
        Thing("blanket", ("soft", "blue", "patched"), "It smelled of home", "Under the blanket it was warm and quiet"),
        Thing("candle", ("white", "yellow", "tall"), "It had been saved for the longest night of the year", "The candle burned with a small, steady flame"),
        Thing("ball", ("red", "leather", "striped"), "It bounced higher than the gate", "The ball rolled across the grass, and everybody ran"),
        Thing("doll", ("rag", "little", "wooden"), "It had two different eyes and a very wise smile", "The doll sat on the shelf and seemed to smile"),
        Thing("umbrella", ("yellow", "black", "striped"), "It had never once let in the rain", "There was room for everyone under the umbrella"),
        Thing("whistle", ("tin", "silver", "wooden"), "One note from it, and every dog came running", "The whistle gave one last merry note"),
        Thing("teapot", ("blue", "round", "cracked"), "It poured the best tea in the valley", "Steam curled up from the teapot"),
        Thing("coin", ("golden", "silver", "lucky"), "It was the first that {he} had ever earned", "The coin was put in a jar, for a rainy day"),
        Thing("seed", ("tiny", "golden", "strange"), "A traveler had told {him} that it would grow into something wonderful", "By spring, the seed had put up one green leaf"),
        Thing("rose", ("red", "white", "single"), "It was the only one that bloomed in winter", "The rose stood in a glass by the bed"),
        Thing("apple", ("golden", "red", "shiny"), "It was the first of the year", "The apple was cut into equal pieces, and it was sweet"),
        Thing("cake", ("honey", "plum", "round"), "It was made from {his} grandfather's secret recipe", "Of the cake, not one crumb was left"),
        Thing("pie", ("cherry", "pumpkin", "warm"), "It had taken all morning to bake", "The pie tasted of summer"),
        Thing("letter", ("long", "sealed", "blue"), "It came from somebody far away", "The letter was read three times before bed"),
        Thing("brush", ("thin", "soft", "old"), "With it, {he} had painted the whole village", "The brush left a bright streak of blue"),
        Thing("needle", ("golden", "thin", "silver"), "It could mend anything, even a torn sail", "The needle flashed in and out in the firelight"),
        Thing("rope", ("strong", "long", "yellow"), "It had saved {his} uncle from the sea", "The rope hung coiled on its hook again"),
        Thing("shovel", ("little", "rusty", "strong"), "It had dug the first well in the village", "The shovel leaned against the wall, shining clean"),
        Thing("boat", ("paper", "wooden", "toy"), "It had a sail made of a handkerchief", "The boat sailed twice around the pond"),
        Thing("wheel", ("wooden", "small", "round"), "Without it, the cart could not roll", "The wheel turned, and the cart rolled down the lane"),
        Thing("star", ("paper", "silver", "glass"), "It hung over {his} bed and kept bad dreams away", "The star twinkled above the bed"),
        Thing("jar", ("glass", "honey", "blue"), "It was full of honey from the last good summer", "Golden light fell through the jar"),
        Thing("pearl", ("white", "tiny", "perfect"), "The sea had given it to {his} mother", "The pearl gleamed like a little moon"),
        Thing("sword", ("wooden", "silver", "old"), "It had never hurt anyone, and {he} was proud of that", "The sword was hung over the door, where it could rest"),
        Thing("shield", ("round", "wooden", "painted"), "There was a lion painted on it, with a very big smile", "The shield made an excellent table for two"),
        Thing("guitar", ("old", "red", "small"), "It knew every song of the valley", "Somebody played the guitar until the fire went out"),
        Thing("trumpet", ("golden", "brass", "dented"), "It could be heard on the other side of the hill", "The trumpet woke up the whole village, and nobody minded"),
        Thing("harp", ("golden", "small", "wooden"), "Its strings were as fine as spider silk", "The harp played so softly that the mice came to listen"),
        Thing("horn", ("curved", "silver", "old"), "It had called the sheep home for a hundred years", "The horn sounded once more over the hills"),
        Thing("puppet", ("wooden", "little", "funny"), "It could make the saddest child laugh", "The puppet danced on the table, and everyone clapped"),
        Thing("necklace", ("pearl", "silver", "thin"), "It held one bead for every happy day", "The necklace got one more bead that evening"),
        Thing("cloak", ("green", "warm", "purple"), "It was as soft as moonlight", "The cloak was wide enough for everyone"),
        Thing("glove", ("red", "woolen", "left"), "The other one was waiting at home", "At last there were two gloves on the line again"),
        Thing("pillow", ("soft", "blue", "feather"), "It was full of good dreams", "The pillow was soft, and the dreams were good"),
        Thing("sled", ("red", "wooden", "fast"), "It was the fastest on the whole hill", "The sled flew down the hill with everyone on it"),
        Thing("egg", ("blue", "spotted", "golden"), "Something inside it went tap, tap, tap", "In the night the egg cracked, and something small said peep"),
        Thing("flower", ("yellow", "white", "rare"), "It opened only when somebody sang to it", "The flower opened its petals and smelled of honey"),
        Thing("chair", ("little", "rocking", "blue"), "It was the only one that never wobbled", "The chair rocked slowly by the fire"),
        Thing("lamp", ("green", "old", "little"), "It made the shadows friendly", "The lamp burned late that night"),
        Thing("bottle", ("green", "tiny", "glass"), "There was a letter in it that nobody could read", "The bottle stood in the window and turned the light green"),
        Thing("pot", ("iron", "big", "copper"), "It had never been empty", "The pot bubbled, and there was soup for everyone"),
        Thing("pen", ("golden", "blue", "old"), "Whatever {he} wrote with it was true", "With the pen, the whole story was written down"),
        Thing("locket", ("silver", "round", "golden"), "There was a very small picture in it", "The locket closed with a soft click"),
    )
}

# Things that cannot crack in two and be glued again.
UNBREAKABLE = frozenset("scarf hat boot blanket rose feather apple cake pie letter seed rope coin ball stone button key needle cloak glove pillow egg flower necklace sword".split())

PLACES = {
    place.noun: place
    for place in (
        Place("forest", "in the forest", "into the forest", ("The air smelled of moss and rain", "The leaves whispered overhead", "Sunlight fell in small gold coins"), ("under a fallen oak", "in a hollow tree", "beneath the ferns"), ("thorns", "log", "dark")),
        Place("river", "by the river", "to the river", ("The water sang over the stones", "Dragonflies flashed like blue sparks", "The reeds bowed in the breeze"), ("among the reeds", "between two wet stones", "under the willow"), ("water", "mud", "log")),
        Place("mountain", "on the mountain", "up the mountain", ("The air was thin and cold", "Clouds floated below like sheep", "An eagle turned in the sky"), ("behind a gray rock", "in a crack in the stone", "under a twisted pine"), ("cliff", "snow", "dark")),
        Place("beach", "on the beach", "to the beach", ("The wind tasted of salt", "Gulls laughed above the waves", "The sand was warm and soft"), ("under a pile of seaweed", "in a tide pool", "behind the old boat"), ("water", "cliff", "mud")),
        Place("meadow", "in the meadow", "to the meadow", ("Bees hummed in the clover", "The grass waved like a green sea", "The air was sweet with flowers"), ("under a bush of wild roses", "in the tall grass", "beside a round white stone"), ("thorns", "mud", "log")),
        Place("cave", "in the cave", "to the cave", ("Water dripped, slow as a clock", "Every step had an echo", "The air was cool and smelled of stone"), ("on a ledge", "behind a pointed rock", "at the bottom of a dry pool"), ("dark", "cliff", "water")),
        Place("market", "at the market", "to the market", ("It smelled of cheese and oranges", "Everybody was shouting prices", "Bright cloth fluttered above the stalls"), ("under the fish stall", "behind a barrel of apples", "beneath a heap of carpets"), ("gate", "mud", "dark")),
        Place("garden", "in the garden", "to the garden", ("The roses nodded in the sun", "It smelled of mint and wet earth", "A fountain splashed somewhere"), ("between two cabbages", "under the rose bush", "behind the watering can"), ("gate", "thorns", "mud")),
        Place("lake", "by the lake", "to the lake", ("The water was as smooth as glass", "A mist lay over the water", "Swallows dipped and turned"), ("under the wooden pier", "among the lilies", "beneath an upturned boat"), ("water", "mud", "thorns")),
        Place("castle", "in the castle", "to the castle", ("The halls were long and cold", "Old flags hung from the walls", "Footsteps rang on the stone"), ("behind a heavy curtain", "inside a suit of armor", "at the bottom of a chest"), ("gate", "dark", "cliff")),
        Place("mill", "at the old mill", "to the old mill", ("The great wheel creaked and dripped", "Flour hung in the air like snow", "It smelled of grain and dust"), ("behind the flour sacks", "under the millstone", "between two floorboards"), ("gate", "water", "dark")),
        Place("library", "in the library", "to the library", ("It smelled of paper and dust", "It was so quiet that the clock sounded loud", "Books rose to the ceiling like walls"), ("between two thick books", "on the highest shelf", "under the reading desk"), ("gate", "dark", "cliff")),
        Place("swamp", "in the swamp", "into the swamp", ("Green bubbles went plop", "The frogs were telling jokes", "Gray moss hung from the trees"), ("on a mossy stump", "between the roots of a dead tree", "among the tall weeds"), ("mud", "water", "thorns")),
        Place("harbor", "at the harbor", "to the harbor", ("Ropes creaked and gulls cried", "It smelled of fish and tar", "The masts swayed like a forest"), ("under a fishing net", "behind a stack of barrels", "at the bottom of a rowboat"), ("gate", "water", "dark")),
        Place("orchard", "in the orchard", "to the orchard", ("The branches were heavy with fruit", "Wasps hummed over the fallen plums", "It smelled of ripe apples"), ("under the oldest apple tree", "in a heap of leaves", "in the fork of a branch"), ("gate", "thorns", "log")),
        Place("hill", "on the hill", "up the hill", ("The wind played with the grass", "One could see the whole valley", "A lark was singing high above"), ("under a lonely thorn tree", "behind the standing stone", "in an old rabbit hole"), ("mud", "cliff", "log")),
        Place("island", "on the island", "to the island", ("Palm leaves rattled in the wind", "The waves rolled in, one by one", "Crabs danced sideways over the sand"), ("under a palm tree", "in the hull of a wreck", "behind a ring of stones"), ("water", "thorns", "cliff")),
        Place("lighthouse", "at the lighthouse", "to the lighthouse", ("The waves boomed far below", "Gulls sat on the railing in a row", "The great lamp turned and turned"), ("behind the great lamp", "under the stairs", "in an old sea chest"), ("gate", "cliff", "dark")),
        Place("bridge", "by the old bridge", "to the old bridge", ("Water rushed under the stones", "Ivy hung from the arches", "Swallows shot through the arches"), ("under the arch", "in a crack between two stones", "among the ivy"), ("water", "mud", "log")),
        Place("desert", "in the desert", "into the desert", ("The sand glittered like gold", "The air trembled with heat", "It was so quiet that {he} could hear the sand"), ("beside a dry well", "in the shade of a rock", "under a thorny bush"), ("thorns", "cliff", "dark")),
        Place("jungle", "in the jungle", "into the jungle", ("Parrots screamed in the treetops", "Everything dripped and rustled", "Vines hung down like green curtains"), ("under a giant leaf", "in the roots of a fig tree", "behind a curtain of vines"), ("thorns", "water", "log")),
        Place("farm", "on the farm", "to the farm", ("Hens scratched in the dust", "It smelled of hay and warm milk", "A rooster crowed, rather late"), ("in the haystack", "under the cart", "behind the trough"), ("gate", "mud", "log")),
        Place("school", "at the school", "to the school", ("It smelled of chalk", "Rows of little coats hung on the wall", "Somebody was practicing the piano, badly"), ("under the last bench", "behind the blackboard", "in the big cupboard"), ("gate", "mud", "dark")),
        Place("barn", "in the barn", "to the barn", ("It smelled of hay and dust", "Sunbeams fell through the cracks", "A cow was chewing slowly"), ("in the hay", "behind a broken cart", "under an old saddle"), ("gate", "dark", "mud")),
        Place("pond", "by the pond", "to the pond", ("Frogs were singing in the reeds", "The water was green and still", "A dragonfly stood in the air"), ("among the lily pads", "under a mossy log", "in the tall reeds"), ("water", "mud", "thorns")),
        Place("tower", "in the old tower", "to the old tower", ("The stairs went round and round", "The wind moaned in the windows", "Pigeons cooed under the roof"), ("under the top stair", "behind a loose brick", "inside a broken chest"), ("gate", "dark", "cliff")),
    )
}

# What blocks the way, as {B}; then, for every ability that helps, how the helper {F} uses it.
OBSTACLES = {
    "thorns": ("a wall of thorns blocked the path", "thick thorns closed the way", "{he} came to a hedge of long, sharp thorns"),
    "log": ("a fallen tree lay across the path", "a huge log blocked the way", "{he} came to a great tree that a storm had thrown over the path"),
    "dark": ("it became so dark that nobody could see the way", "the way led into a darkness as black as ink", "the light ended, and ahead there was only darkness"),
    "water": ("the water was too deep to cross", "{he} came to a place where the bridge was gone and the water was deep", "cold, deep water lay between {H} and the other side"),
    "mud": ("the ground turned into deep, sticky mud", "thick mud covered the whole path", "the path sank into brown mud that went glup, glup"),
    "cliff": ("a steep wall of stone rose in front of {him}", "the way went straight up, as steep as a ladder", "{he} came to a high stone wall with no stairs at all"),
    "gate": ("{he} came to a gate, and it was locked", "a heavy iron gate barred the way", "{he} stood before a locked gate, and nobody answered"),
    "snow": ("snow lay so deep that the path was gone", "a great drift of snow blocked the way", "{he} came to a slope where fresh snow covered everything"),
}
SOLUTIONS = {
    ("thorns", "small"): ("{F} crept under the thorns and bent them aside from within", "{F} was small enough to slip between the thorns, and bit a path through them"),
    ("thorns", "wings"): ("{F} flew over the thorns and found a gap on the far side", "{F} rose into the air and called out where the thorns were thin"),
    ("thorns", "dig"): ("{F} dug a neat tunnel under the thorns", "{F} dug until earth flew everywhere, and soon there was a way under the thorns"),
    ("log", "strong"): ("{F} leaned against the tree and pushed until it rolled away", "{F} took a deep breath and lifted the tree aside"),
    ("log", "climb"): ("{F} climbed over the tree and let down a rope of ivy", "{F} ran up the trunk and showed {him} where to put each foot"),
    ("log", "dig"): ("{F} dug a hollow under the tree, just big enough to crawl through", "{F} scratched away the earth below the tree until there was a way under it"),
    ("dark", "light"): ("{F} made a small, warm light and walked ahead", "{F} lit up the way with a bright little flame"),
    ("dark", "clever"): ("{F} said, \"Keep one hand on the wall and count your steps,\" and so they went safely through", "{F} tied a thread to a stone, so that they could always find the way back"),
    ("water", "swim"): ("{F} swam across and carried {H} safely over", "{F} slid into the water and pulled {H} across on a piece of wood"),
    ("water", "wings"): ("{F} flew over with the end of a rope, and {H} crossed on it step by step", "{F} flew across and pushed an old boat back to {him}"),
    ("water", "strong"): ("{F} carried {H} through the water on {fhis} broad back", "{F} threw great stones into the water, one after another, to step on"),
    ("mud", "strong"): ("{F} pulled {H} through the mud with one great heave", "{F} laid a heavy plank over the mud as if it weighed nothing"),
    ("mud", "clever"): ("{F} laid branches over the mud, one after another, like a carpet", "{F} said, \"Step only where the grass grows,\" and that was the whole trick"),
    ("mud", "wings"): ("{F} flew ahead and pointed out every dry spot", "{F} circled above and found a dry path around the mud"),
    ("cliff", "climb"): ("{F} climbed to the top and let down a rope", "{F} jumped from stone to stone and showed {him} the safe way up"),
    ("cliff", "wings"): ("{F} flew up and found a hidden stair", "{F} flew to the top and dropped the end of a long vine"),
    ("cliff", "strong"): ("{F} lifted {H} up as easily as a loaf of bread", "{F} stood below, and {H} climbed up on {fhis} shoulders"),
    ("gate", "small"): ("{F} slipped under the gate and opened it from the inside", "{F} squeezed between the bars and lifted the latch from inside"),
    ("gate", "clever"): ("{F} looked under the mat, and there lay the spare key", "{F} noticed that the latch was on the wrong side, and opened it with a twig"),
    ("gate", "strong"): ("{F} lifted the gate off its hinges and politely put it back afterward", "{F} gave the gate one push, and it swung open"),
    ("snow", "dig"): ("{F} dug a path through the snow, straight as a ruler", "{F} dug a white tunnel, and they walked through it in single file"),
    ("snow", "strong"): ("{F} pushed through the snow like a plow, and {H} followed", "{F} stamped a wide path through the snow"),
}
SEASONS = ("spring", "summer", "autumn", "winter")
WEATHER = {
    "spring": ("when the first flowers opened", "when the rain had just stopped", "when the birds came back"),
    "summer": ("when the sky was wide and blue", "when even the shadows were warm", "when the cherries were ripe"),
    "autumn": ("when the leaves turned gold", "when the mist lay in the fields", "when the wind smelled of apples"),
    "winter": ("when the first snow fell", "when frost drew flowers on the windows", "when the nights were long and clear"),
}
