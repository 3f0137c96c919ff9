"""Questions of the kinds that the example drafts were trained on (word problems, programs, mathematics, chat), written
for these tests, so that no draft has seen them; and a text that repeats itself, as edited code does."""

WORD_PROBLEMS = (
    "A baker makes 48 rolls in the morning and 36 in the afternoon. She sells 65 of them. How many rolls are left?",
    "Tom reads 14 pages a day. His book has 322 pages. How many days does he need to finish it?",
    "A train travels 85 kilometers in one hour. How far does it travel in 4 and a half hours?",
    "Lena has 3 times as many stamps as Paul. Together they have 96 stamps. How many stamps does Lena have?",
    "A shirt costs $24 and is sold with a 25% discount. What is the new price?",
    "Five friends share a bill of $87.50 equally. How much does each of them pay?",
    "A garden is 12 meters long and 7 meters wide. How many meters of fence are needed to go around it?",
    "Maria saves $15 every week. After how many weeks does she have enough for a bicycle that costs $240?",
    "A box holds 24 apples. A farmer has 1000 apples. How many full boxes can he pack, and how many apples are left?",
    "A tank holds 500 liters. Water flows in at 12 liters a minute and out at 4 liters a minute. When is it full?",
    "Sam is 8 years older than his sister. In 5 years the sum of their ages will be 40. How old is Sam now?",
    "A printer prints 18 pages a minute. How long does it take to print 45 copies of a document with 12 pages?",
    "There are 32 students in a class. 5/8 of them play football. How many students do not play football?",
    "A rope of 9 meters is cut into pieces of 0.75 meters. How many pieces are there?",
    "A cyclist rides 20 km at 16 km per hour and then 15 km at 12 km per hour. How long is she on the road?",
    "A cinema has 18 rows with 22 seats each. For a show 315 tickets were sold. How many seats stay empty?",
)
PROGRAMS = (
    "Write a Python function that returns the largest number of a list.",
    "Write a Python function to check whether a string is a palindrome.",
    "Write a function in Python that counts the vowels in a string.",
    "Write a Python function that computes the factorial of a number.",
    "Write a Python function to merge two sorted lists into one sorted list.",
    "Write a Python function that removes duplicates from a list and keeps the order.",
    "Write a Python function to convert a temperature from Celsius to Fahrenheit.",
    "Write a Python function to find the second smallest element of a list.",
    "Write a Python function that returns the sum of the digits of a number.",
    "Write a Python function that checks whether a number is prime.",
    "Write a Python function to reverse the words of a sentence.",
    "Write a Python function that counts how often each word occurs in a text.",
    "Write a Python function to compute the n-th Fibonacci number.",
    "Write a Python function to rotate a list by k positions to the right.",
    "Write a Python function that returns the common elements of two lists.",
    "Write a Python function that finds the longest word in a list of words.",
)
MATHEMATICS = (
    "Solve for x: 3x + 7 = 22.",
    "What is the area of a circle with radius 5?",
    "Simplify the expression 4(x - 2) + 3x.",
    "Find the slope of the line through the points (2, 3) and (6, 11).",
    "What is the least common multiple of 12 and 18?",
    "Factor the polynomial x^2 - 5x + 6.",
    "What is the sum of the first 20 positive integers?",
    "A right triangle has legs of length 6 and 8. What is the length of the hypotenuse?",
    "Evaluate 2^5 - 3^3.",
    "What is the probability of rolling a sum of 7 with two dice?",
)
CHAT = (
    "Explain in simple words why the sky is blue.",
    "Give me three tips for learning a new language.",
    "Write a short poem about the sea.",
    "What are the advantages of riding a bicycle to work?",
    "Describe how a bill becomes a law.",
    "Write an email to a colleague to move a meeting to Friday.",
    "What should I consider when I adopt a dog?",
    "Explain the difference between weather and climate.",
    "Summarize the story of Romeo and Juliet in a few sentences.",
    "How do I make a simple tomato soup?",
)
HELD_OUT = (*WORD_PROBLEMS, *PROGRAMS, *MATHEMATICS, *CHAT)

EDITED_CODE = """Rename the parameter `x` to `value` in this class and write the whole class again.

```python
class Counter:
    def __init__(self, start=0):
        self.total = start
        self.history = []

    def add(self, x):
        self.total = self.total + x
        self.history.append(x)
        return self.total

    def subtract(self, x):
        self.total = self.total - x
        self.history.append(-x)
        return self.total

    def multiply(self, x):
        self.total = self.total * x
        self.history.append(x)
        return self.total
```"""
